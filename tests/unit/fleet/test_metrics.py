"""Reading a server's Prometheus page."""

from rookery.fleet.http.probe import parse_metrics

PAGE = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="/m,{x}\\"y"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 9.0
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:kv_cache_usage_perc{engine="1"} 0.5
vllm:prefix_cache_queries_total{engine="0"} 1e+03
vllm:prefix_cache_queries_created{engine="0"} 1.79e+09
vllm:prefix_cache_hits_total{engine="0"} 250.0
vllm:generation_tokens_total{engine="0"} 77.0
vllm:cache_config_info{block_size="128",enable_prefix_caching="True",engine="0"} 1.0
python_gc_objects_collected_total{generation="0"} 1.0
"""


def test_engines_are_summed_and_other_lines_skipped() -> None:
    found = parse_metrics(PAGE)
    assert (found.num_running, found.num_waiting, found.generated_tokens) == (7, 2, 77)
    assert (found.prefix_queries, found.prefix_hits, found.hit_rate) == (1000, 250, 0.25)
    assert (found.cache_usage, found.block_tokens, found.has_prefix_cache) == (0.5, 128, True)


def test_values_that_are_no_numbers_are_not_told() -> None:
    page = "vllm:num_requests_running NaN\nvllm:num_requests_waiting +Inf\nvllm:prefix x\n"
    found = parse_metrics(page + "vllm:kv_cache_usage_perc NaN\n")
    assert (found.num_running, found.num_waiting, found.cache_usage) == (0, 0, 0.0)


def test_an_empty_page_invents_nothing() -> None:
    found = parse_metrics("nothing here\n{}\n")
    assert found.hit_rate is None and found.block_tokens is None and found.has_prefix_cache is None
    assert found.num_running == 0

// Current state of servers and of a service; a form to sample with a tenant's key.

import { brandLine, emptyNote, errorNote, facts, h, lead, section, table } from "./dom.js";
import { count, isNumber, number } from "./words.js";

const LOOK_MS = 2000;

// A page that polls every two seconds while visible, and keeps its content if a request fails.
class Watched {
  constructor(source, main, { here, title, said, path, draw, after }) {
    Object.assign(this, { source, path, draw, body: h("div", null, emptyNote("Asking …")), trouble: h("div"), after: h("div", { hidden: true }, after) });
    main.replaceChildren(h("header", { class: "masthead" }, brandLine(here), h("h1", null, title), lead(said)), this.trouble, this.body, this.after);
    document.title = `${title} · Rookery`;
  }

  start() {
    this.look();
    this.timer = setInterval(() => document.hidden || this.look(), LOOK_MS);
  }

  async look() {
    if (this.isAsking) return; // a request to a server that is down takes long
    this.isAsking = true;
    try {
      const state = await this.source.get(this.path);
      this.body.replaceChildren(...this.draw(state));
      this.after.hidden = state.url === "";
      this.trouble.replaceChildren();
    } catch (error) {
      this.body.querySelector(".empty")?.remove();
      this.trouble.replaceChildren(errorNote(error));
    } finally {
      this.isAsking = false;
    }
  }

  close() {
    clearInterval(this.timer);
  }
}

const share = (value) => (isNumber(value) ? [h("progress", { class: "load", max: 1, value, "aria-hidden": "true" }), `${Math.round(100 * value)} %`] : "–");
const amount = (value) => (isNumber(value) ? count(value) : "–");
const upMark = (isUp) => h("span", { class: "mark", "data-status": isUp ? "done" : "failed" }, isUp ? "up" : "down");

function drawServers({ servers }) {
  if (!servers.length) return [h("div", { class: "empty" }, h("p", null, "No server runs on this machine for you."), h("p", null, "Start some, and they appear here: ", h("code", null, "rookery fleet up MODEL"), ". Show others with ", h("code", null, "rookery ui --fleet URL"), "."))];
  const running = servers.filter((one) => one.is_up);
  const sum = (key) => running.reduce((total, one) => total + (one[key] ?? 0), 0);
  const row = (one) => [h("span", { class: "name" }, one.url), upMark(one.is_up), [one.model, one.version && h("span", { class: "note" }, ` vLLM ${one.version}`)], amount(one.num_running), amount(one.num_waiting), share(one.cache_usage), share(one.hit_rate), amount(one.adapters.length), amount(one.num_restarts), String(one.pid ?? "–")];
  const named = servers.filter((one) => one.adapters.length);
  return [
    facts([["Up", `${running.length} of ${servers.length}`], ["Running", count(sum("num_running"))], ["Waiting", count(sum("num_waiting"))], ["Adapters", count(new Set(servers.flatMap((one) => one.adapters)).size)]]),
    section("Servers", table(["Server", "Status", "Model", ["Running"], ["Waiting"], "KV cache in use", "Prefix cache hits", ["Adapters"], ["Restarts"], ["Process"]], servers.map(row))),
    ...servers.filter((one) => one.error).map((one) => errorNote(new Error(`${one.url}: ${one.error}`))),
    named.length ? section("Adapters", table(["Server", "Loaded"], named.map((one) => [one.url, one.adapters.join(", ")]))) : "",
  ];
}

export async function showFleet(source, main) {
  const view = new Watched(source, main, { here: "fleet", title: "Fleet", said: "Servers with their load, caches, adapters and restarts, read every two seconds.", path: "fleet", draw: drawServers });
  view.start();
  return view;
}

function drawService({ url, models, queues = [], tenants = [], journal_bytes: journal, reason }) {
  if (!url) return [emptyNote("No service is named: start `rookery ui --service URL` to see one.")];
  const wait = (queue) => (queue.tokens_per_s ? `${number(queue.tokens_waiting / queue.tokens_per_s, 0)} s` : "not known");
  const queue = (one) => [one.name, count(one.num_waiting), count(one.tokens_waiting), one.tokens_per_s ? count(Math.round(one.tokens_per_s)) : "not measured yet", wait(one)];
  const tenant = (one) => [h("span", { class: "name" }, one.name), count(one.num_pending), count(one.num_models), count(one.num_checkpoints), ...["trained", "sampled", "prompt"].map((kind) => count(one.tokens[kind] ?? 0))];
  const details = [["Address", url], ["Models", (models ?? []).join(", ")], ["Journal since the last snapshot", isNumber(journal) ? `${(journal / 1048576).toFixed(1)} MiB` : ""]];
  return [
    facts(details.filter(([, detail]) => detail)),
    reason ? emptyNote(`It tells its queues and tenants to its own machine alone: ${reason}`) : "",
    queues.length ? section("Queues", table(["Queue", ["Requests waiting"], ["Tokens waiting"], ["Tokens/s"], ["Until all are done"]], queues.map(queue))) : "",
    queues.length ? section("Tenants", tenants.length ? table(["Tenant", ["Waiting or running"], ["Models in training"], ["Checkpoints"], ["Trained tokens"], ["Sampled tokens"], ["Prompt tokens"]], tenants.map(tenant)) : emptyNote("Nobody has used it yet.")) : "",
  ];
}

// The key stays in the page's memory: it is in no address and is gone once the page closes.
function sampleBox(source) {
  const key = h("input", { type: "password", autocomplete: "off", placeholder: "none, where the service has no keys" });
  const model = h("select", { required: true });
  const prompt = h("textarea", { rows: 5, required: true });
  const tokens = h("input", { type: "number", min: 1, max: 4096, value: 128 });
  const temperature = h("input", { type: "number", min: 0, max: 5, step: 0.1, value: 0 });
  const answer = h("div", { "aria-live": "polite" });
  const saved = h("div");
  const run = async (work) => {
    try {
      await work();
    } catch (error) {
      answer.replaceChildren(errorNote(error));
    }
  };
  const list = () => run(async () => {
    const listing = await source.get("service/models", null, { key: key.value });
    model.replaceChildren(...listing.models.map((name) => h("option", { value: name }, name)));
    const row = (one) => [h("span", { class: "name" }, one.tinker_path ?? one.checkpoint_id), one.checkpoint_type ?? "", one.time ?? "", isNumber(one.size_bytes) ? `${(one.size_bytes / 1048576).toFixed(1)} MiB` : "–"];
    saved.replaceChildren(listing.checkpoints.length ? table(["Checkpoint", "Kind", "Saved", ["Size"]], listing.checkpoints.map(row)) : emptyNote("This tenant has no checkpoint."));
    answer.replaceChildren();
  });
  const sample = () => run(async () => {
    answer.replaceChildren(emptyNote("Drawing …"));
    const completion = await source.get("service/sample", null, { key: key.value, model: model.value, prompt: prompt.value, max_tokens: Number(tokens.value), temperature: Number(temperature.value) });
    const used = completion.usage ? `, ${count(completion.usage.completion_tokens, "token")}` : "";
    answer.replaceChildren(h("h3", null, "Answer", h("span", { class: "note" }, ` ended by ${completion.finish_reason ?? "nothing known"}${used}`)), h("pre", { class: "answer" }, completion.text));
  });
  const labelled = (text, field) => h("label", null, text, field);
  const form = h("form", { class: "sample", onsubmit: (e) => { e.preventDefault(); sample(); } },
    labelled("The tenant's key", key), h("button", { type: "button", onclick: list }, "Show its models and checkpoints"), saved,
    h("div", { class: "row" }, labelled("Model or checkpoint", model), labelled("Tokens at most", tokens), labelled("Temperature", temperature)),
    labelled("Prompt", prompt), h("button", null, "Sample"), answer);
  return section("Sample", lead("From any model or checkpoint of a tenant, with its key."), form);
}

export async function showService(source, main) {
  const view = new Watched(source, main, { here: "service", title: "Service", said: "Tenants, queues and throughput, read every two seconds.", path: "service", draw: drawService, after: sampleBox(source) });
  view.start();
  return view;
}

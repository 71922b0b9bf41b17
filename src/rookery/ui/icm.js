// The charts of an icm report: utility, frustration and labels over the iterations, margins, tokens.

const chains = () => report.chains.filter((chain) => chain.steps.length);

function iterationAxis(colours) {
  return axis(colours, {
    type: "value",
    name: "Iteration",
    nameGap: 30,
    minInterval: 1,
    axisLine: { show: true, onZero: false, lineStyle: { color: colours.faint } },
  });
}

function stepTip({ data }) {
  const { chain, step } = data;
  return tip(`Batch ${chain.batch}, chain ${chain.chain}`, [
    ["iteration", count(step.iteration)],
    ["utility", score(step.utility)],
    ["best so far", score(step.best)],
    ["temperature", score(step.temperature)],
    ["labelled", count(step.num_labelled)],
    ["frustrated", count(step.num_frustrated)],
    ...report.labels.map((label, i) => [label, count(step.counts[i] ?? 0)]),
  ]);
}

// A line per chain; the best of its batch in colour.
function overIterations(colours, name, value, options = {}) {
  const base = frame(colours);
  return {
    ...base,
    grid: { left: 56, right: 24, top: 40, bottom: 52 },
    tooltip: { ...base.tooltip, trigger: "item", formatter: stepTip },
    xAxis: iterationAxis(colours),
    yAxis: upright(colours, name, { scale: true, ...options }),
    series: chains().map((chain) => ({
      type: "line",
      step: "end",
      data: chain.steps.map((step) => ({ value: [step.iteration, value(step)], chain, step })),
      symbol: "circle",
      symbolSize: 5,
      showSymbol: chain.steps.length <= 200,
      lineStyle: {
        color: chain.is_best ? colours.accent : colours.faint,
        width: chain.is_best ? 2.25 : 1.25,
      },
      itemStyle: { color: chain.is_best ? colours.accent : colours.faint },
      z: chain.is_best ? 3 : 2,
    })),
  };
}

function utility(colours) {
  return overIterations(colours, "Utility", (step) => step.utility);
}

function frustrated(colours) {
  return overIterations(colours, "Frustrated items", (step) => step.num_frustrated, {
    minInterval: 1,
  });
}

function labelled(colours) {
  return overIterations(colours, "Labelled items", (step) => step.num_labelled, {
    minInterval: 1,
  });
}

// How sure the labels are: items by the log-odds of their label, a bar per label.
const MARGIN_BINS = 24;
const BIN_WIDTHS = [0.1, 0.2, 0.5, 1, 2, 5];

// Round bins, so that no two carry the same number: their width, and how many there are from where.
function bins(values) {
  const [low, high] = [Math.min(0, ...values), Math.max(1, ...values)];
  const width = BIN_WIDTHS.find((each) => (high - low) / each < MARGIN_BINS - 1) ?? 10;
  const first = Math.floor(low / width);
  return { width, first, num: Math.floor(high / width) - first + 1 };
}

function margins(colours) {
  const items = report.items.filter((item) => isNumber(item.margin));
  const { width, first, num } = bins(items.map((item) => item.margin));
  const bin = (value) => Math.floor(value / width) - first;
  const shades = [colours.accent, colours.faint, colours.muted, colours.ink];
  const base = frame(colours);
  return {
    ...base,
    grid: { left: 48, right: 16, top: 56, bottom: 52 },
    legend: { top: 0, right: 0, icon: "circle", textStyle: { color: colours.muted } },
    tooltip: {
      ...base.tooltip,
      trigger: "item",
      formatter: ({ seriesName, name, value }) => tip(seriesName, [["log-odds from", name], ["items", count(value)]]),
    },
    xAxis: axis(colours, {
      type: "category",
      name: "Log-odds of the label",
      nameGap: 30,
      data: [...Array(num).keys()].map((i) => fixed((first + i) * width, 1)),
      axisLine: { show: true, onZero: false, lineStyle: { color: colours.faint } },
    }),
    yAxis: upright(colours, "Items", { minInterval: 1 }),
    series: report.labels.map((label, i) => {
      const data = Array(num).fill(0);
      items.filter((item) => item.label === label).forEach((item) => (data[bin(item.margin)] += 1));
      return {
        type: "bar",
        name: label,
        stack: "items",
        data,
        barCategoryGap: "12%",
        itemStyle: { color: shades[i % shades.length] },
        emphasis: { disabled: true },
      };
    }),
  };
}

function prefill(colours, { width }) {
  const rows = [
    ["a plain loop", report.tokens.naive],
    ["each context once", report.tokens.requested],
    ["with shared prefixes", report.tokens.computed],
  ];
  const base = frame(colours);
  return {
    ...base,
    grid: { left: Math.min(150, width * 0.4), right: 72, top: 12, bottom: 44 },
    tooltip: { ...base.tooltip, formatter: ({ name, value }) => tip(name, [["tokens", count(value)]]) },
    xAxis: axis(colours, {
      type: "value",
      name: "Prompt tokens",
      nameGap: 26,
      axisLabel: { color: colours.muted, fontSize: 12, formatter: short, hideOverlap: true },
      splitLine: { show: true, lineStyle: { color: colours.line } },
    }),
    yAxis: axis(colours, {
      type: "category",
      inverse: true,
      data: rows.map(([name]) => name),
      axisLabel: { color: colours.ink, fontSize: 12, interval: 0 },
    }),
    series: [
      {
        type: "bar",
        barWidth: "56%",
        data: rows.map(([, value], i) => ({
          value,
          itemStyle: { color: i === 2 ? colours.accent : colours.faint, borderRadius: 2 },
        })),
        label: {
          show: true,
          position: "right",
          fontSize: 12,
          color: colours.muted,
          formatter: ({ value }) => short(value),
        },
        emphasis: { disabled: true },
      },
    ],
  };
}

const numSteps = () => chains().reduce((sum, chain) => sum + chain.steps.length, 0);
const kinds = {
  utility: { draw: utility, size: () => ({ height: 340 }), marks: numSteps },
  frustrated: { draw: frustrated, size: () => ({ height: 260 }), marks: numSteps },
  labelled: { draw: labelled, size: () => ({ height: 260 }), marks: numSteps },
  margins: { draw: margins, size: () => ({ height: 280 }), marks: () => MARGIN_BINS * 2 },
  prefill: { draw: prefill, size: () => ({ height: 190 }), marks: () => 3 },
};

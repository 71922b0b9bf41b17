// The charts of an evolve report: the best score over the iterations, the grids, staleness.

const value = (number) => (isNumber(number) ? Number(number.toPrecision(6)).toString() : "-");

const last = (points) => [points.at(-1).num_decided, points.at(-1).best];

function curve(colours) {
  const points = report.curve.filter((point) => isNumber(point.best));
  const base = frame(colours);
  return {
    ...base,
    grid: { left: 64, right: 24, top: 40, bottom: 52 },
    tooltip: {
      ...base.tooltip,
      trigger: "item",
      formatter: ({ data }) =>
        tip("New best", [
          ["iteration", count(data.point.iteration)],
          ["decided before", count(data.point.num_decided)],
          ["score", value(data.point.best)],
        ]),
    },
    xAxis: axis(colours, {
      type: "value",
      name: "Iterations decided",
      nameGap: 30,
      minInterval: 1,
      max: Math.max(1, report.num_iterations),
      axisLine: { show: true, onZero: false, lineStyle: { color: colours.faint } },
    }),
    yAxis: upright(colours, "Best score", { scale: true }),
    series: [
      {
        type: "line",
        step: "end",
        data: points.map((point) => ({ value: [point.num_decided, point.best], point })),
        symbol: "circle",
        symbolSize: 6,
        lineStyle: { color: colours.accent, width: 2.25 },
        itemStyle: { color: colours.accent },
      },
      {
        // The last best holds until the end.
        type: "line",
        data: points.length ? [last(points), [report.num_iterations, points.at(-1).best]] : [],
        symbol: "none",
        silent: true,
        lineStyle: { color: colours.accent, width: 2.25 },
      },
    ],
  };
}

// The cells of one island by their first two dimensions; of more, the best of what lies above.
const binsOf = (cell) => cell.cell.split("-").map(Number);
const islands = [...new Set(report.cells.map((cell) => cell.island))].sort((a, b) => a - b);

function grid(colours, { index }) {
  const cells = report.cells.filter((cell) => cell.island === islands[index] && isNumber(cell.score));
  const best = new Map();
  for (const cell of cells) {
    const [x, y = 0] = binsOf(cell);
    const key = `${x}-${y}`;
    if (!best.has(key) || best.get(key).cell.score < cell.score) best.set(key, { x, y, cell });
  }
  // One scale for all islands, so that they can be compared.
  const scores = report.cells.map((cell) => cell.score).filter(isNumber);
  const [names, bins] = [report.feature_dimensions, report.bins];
  const ticks = (num) => [...Array(num ?? 1).keys()].map(String);
  const base = frame(colours);
  return {
    ...base,
    grid: { left: 56, right: 16, top: 16, bottom: 72 },
    tooltip: {
      ...base.tooltip,
      formatter: ({ data }) =>
        tip(data.cell.program, [
          ["score", value(data.cell.score)],
          ...binsOf(data.cell).map((bin, i) => [names[i] ?? `dimension ${i + 1}`, String(bin)]),
        ]),
    },
    visualMap: {
      show: false,
      min: Math.min(...scores),
      max: Math.max(...scores),
      inRange: { color: [colours.wash, colours.accent] },
    },
    xAxis: axis(colours, { type: "category", data: ticks(bins[0]), name: names[0] ?? "", nameGap: 30 }),
    yAxis: axis(colours, { type: "category", data: ticks(bins[1]), name: names[1] ?? "", nameGap: 32 }),
    series: [
      {
        type: "heatmap",
        data: [...best.values()].map(({ x, y, cell }) => ({ value: [x, y, cell.score], cell })),
        itemStyle: { borderColor: colours.ground, borderWidth: 1 },
        emphasis: { itemStyle: { borderColor: colours.ink } },
      },
    ],
  };
}

function staleness(colours) {
  const rows = Object.entries(report.staleness).sort(([a], [b]) => Number(a) - Number(b));
  const base = frame(colours);
  return {
    ...base,
    grid: { left: 56, right: 16, top: 40, bottom: 52 },
    tooltip: {
      ...base.tooltip,
      formatter: ({ name, value: num }) => tip(`${name} decided meanwhile`, [["iterations", count(num)]]),
    },
    xAxis: axis(colours, {
      type: "category",
      name: "Iterations decided between plan and decision",
      nameGap: 30,
      data: rows.map(([name]) => name),
      axisLine: { show: true, onZero: false, lineStyle: { color: colours.faint } },
    }),
    yAxis: upright(colours, "Iterations", { minInterval: 1 }),
    series: [
      {
        type: "bar",
        data: rows.map(([, num]) => num),
        barCategoryGap: "12%",
        itemStyle: { color: colours.accent },
        emphasis: { disabled: true },
      },
    ],
  };
}

const kinds = {
  curve: { draw: curve, size: () => ({ height: 340 }), marks: () => report.curve.length },
  grid: { draw: grid, size: () => ({ height: 320 }), marks: () => report.cells.length },
  staleness: { draw: staleness, size: () => ({ height: 260 }), marks: () => Object.keys(report.staleness).length },
};

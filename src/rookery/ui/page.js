// The other charts of a genome report; draw.js draws what `kinds` names.

const FITNESS_PX = 380;

function generationAxis(colours) {
  return axis(colours, {
    type: "category",
    name: "Generation",
    nameGap: 30,
    data: report.generations.map((g) => String(g.generation)),
    axisLine: { show: true, onZero: false, lineStyle: { color: colours.faint } },
  });
}

// The tooltip of the generation that the pointer is over, whichever series answered first.
function generationTip(items) {
  const name = [items].flat()[0].axisValue;
  const g = report.generations.find((one) => String(one.generation) === name);
  const pairs = [
    ["best so far", score(g.best)],
    ["mean", score(g.mean)],
    ["worst", score(g.worst)],
    ["candidates", count(g.num_candidates)],
    ["tokens", count(g.num_tokens)],
  ];
  if (isNumber(g.seconds)) pairs.push(["time", `${g.seconds.toFixed(1)} s`]);
  if (g.num_dropped) pairs.push(["dropped early", count(g.num_dropped)]);
  if (g.num_failed) pairs.push(["failed", count(g.num_failed)]);
  if (g.stage) pairs.unshift(["stage", g.stage]);
  return tip(`Generation ${g.generation}`, pairs);
}

// Lowest and highest score of each generation, in stretches: broken where one has no scores.
function bands() {
  const stretches = [[]];
  report.generations.forEach((g, x) => {
    const scores = g.scores.filter(isNumber);
    if (scores.length) stretches.at(-1).push([x, Math.min(...scores), Math.max(...scores)]);
    else stretches.push([]);
  });
  return stretches.filter((stretch) => stretch.length > 1);
}

function bandSeries(colours) {
  const stretches = bands();
  return {
    type: "custom",
    silent: true,
    clip: true,
    // The data only tells the axes how far the band reaches.
    data: stretches.flatMap((s, k) => s.flatMap(([x, low, high]) => [[x, low, k], [x, high, k]])),
    encode: { x: 0, y: 1 },
    renderItem: (params, api) => {
      const k = api.value(2);
      if (params.context[k]) return undefined;
      params.context[k] = true;
      const upper = stretches[k].map(([x, , high]) => api.coord([x, high]));
      const lower = stretches[k].map(([x, low]) => api.coord([x, low])).reverse();
      const points = [...upper, ...lower];
      return { type: "polygon", shape: { points }, style: { fill: colours.accent, opacity: 0.1 } };
    },
    z: 1,
  };
}

// How far to move the labels at the right end apart, in pixels, so that both can be read.
function labelShift() {
  const last = report.generations.at(-1);
  const ends = report.generations.flatMap((g) => [g.best, g.mean, g.worst]).filter(isNumber);
  if (!isNumber(last.best) || !isNumber(last.mean)) return 0;
  const range = Math.max(...ends) - Math.min(...ends) || 1;
  const distance = ((last.best - last.mean) / range) * (FITNESS_PX - 92) * 0.8;
  return (Math.max(0, 17 - Math.abs(distance)) / 2) * (distance < 0 ? -1 : 1);
}

function lineSeries(name, values, { colour, width, shift }) {
  return {
    type: "line",
    name,
    data: values,
    symbol: "circle",
    symbolSize: width * 2.6,
    showSymbol: values.length <= 40,
    lineStyle: { color: colour, width },
    itemStyle: { color: colour },
    endLabel: {
      show: true,
      formatter: name,
      color: colour,
      fontSize: 13,
      fontWeight: 600,
      distance: 10,
      offset: [0, shift],
    },
    z: 4,
  };
}

function fitness(colours) {
  const dots = report.generations.flatMap((g, x) => g.scores.filter(isNumber).map((y) => [x, y]));
  const base = frame(colours);
  const shift = labelShift();
  return {
    ...base,
    grid: { left: 48, right: 56, top: 40, bottom: 52 },
    tooltip: {
      ...base.tooltip,
      trigger: "axis",
      axisPointer: { type: "line", lineStyle: { color: colours.faint, type: "solid" } },
      formatter: generationTip,
    },
    xAxis: generationAxis(colours),
    yAxis: upright(colours, "Score on the search tasks", { scale: true }),
    series: [
      lineSeries("mean", report.generations.map((g) => g.mean), {
        colour: colours.muted, width: 1.75, shift,
      }),
      lineSeries("best", report.generations.map((g) => g.best), {
        colour: colours.accent, width: 2.75, shift: -shift,
      }),
      bandSeries(colours),
      {
        type: "scatter",
        data: dots,
        symbolSize: 6,
        silent: true,
        tooltip: { show: false },
        itemStyle: { color: colours.muted, opacity: 0.35 },
        z: 3,
      },
    ],
  };
}

function sources() {
  const measured = new Set(report.rows.flatMap((row) => Object.keys(row.by_source)));
  const declared = report.tasksets.map((t) => t.name).filter((name) => measured.has(name));
  return [...new Set([...declared, ...measured])];
}

function taskset(colours, { index, width }) {
  const source = sources()[index];
  const values = report.rows.map((row) => row.by_source[source] ?? null);
  const isFraction = values.every((v) => v === null || (v >= 0 && v <= 1));
  const base = frame(colours);
  return {
    ...base,
    grid: { left: Math.min(132, width * 0.36), right: 48, top: 24, bottom: 44 },
    tooltip: {
      ...base.tooltip,
      trigger: "item",
      formatter: ({ dataIndex }) =>
        tip(report.rows[dataIndex].name, [[source, score(values[dataIndex])]]),
    },
    xAxis: axis(colours, {
      type: "value",
      name: "Accuracy",
      nameGap: 26,
      min: isFraction ? 0 : undefined,
      max: isFraction ? 1 : undefined,
      interval: isFraction ? 0.25 : undefined,
      splitLine: { show: true, lineStyle: { color: colours.line } },
    }),
    yAxis: axis(colours, {
      type: "category",
      name: "Method",
      nameLocation: "start",
      nameGap: 8,
      nameTextStyle: { color: colours.muted, fontSize: 12, align: "right", padding: [0, 8, 0, 0] },
      inverse: true,
      data: report.rows.map((row) => row.name),
      axisLabel: {
        color: colours.ink,
        fontSize: 12,
        interval: 0,
        width: Math.min(124, width * 0.34),
        overflow: "truncate",
      },
    }),
    series: [
      {
        type: "bar",
        barWidth: "62%",
        data: report.rows.map((row, i) => ({
          value: values[i],
          itemStyle: { color: row.is_winner ? colours.accent : colours.faint, borderRadius: 2 },
          label: { color: row.is_winner ? colours.accent : colours.muted },
        })),
        label: {
          show: true,
          position: "right",
          fontSize: 12,
          formatter: ({ value }) => score(value),
        },
        emphasis: { disabled: true },
      },
    ],
  };
}

function tokens(colours) {
  const base = frame(colours);
  return {
    ...base,
    grid: { left: 48, right: 12, top: 40, bottom: 52 },
    tooltip: {
      ...base.tooltip,
      trigger: "axis",
      axisPointer: { type: "shadow", shadowStyle: { color: colours.line, opacity: 0.5 } },
      formatter: generationTip,
    },
    xAxis: generationAxis(colours),
    yAxis: upright(colours, "Tokens", {
      minInterval: 1,
      axisLabel: { color: colours.muted, fontSize: 12, formatter: short },
    }),
    series: [
      {
        type: "bar",
        data: report.generations.map((g) => g.num_tokens),
        barMaxWidth: 44,
        barCategoryGap: "35%",
        itemStyle: { color: colours.faint, borderRadius: [2, 2, 0, 0] },
        emphasis: { disabled: true },
      },
    ],
  };
}

const kinds = {
  fitness: {
    draw: fitness,
    size: () => ({ height: FITNESS_PX }),
    marks: () => report.num_candidates,
  },
  lineage: {
    draw: lineage,
    size: lineageSize,
    marks: () => report.lineage.length * 3,
    ready: traceAncestry,
  },
  taskset: {
    draw: taskset,
    size: () => ({ height: report.rows.length * 27 + 68 }),
    marks: () => report.rows.length,
  },
  tokens: {
    draw: tokens,
    size: () => ({ height: 250 }),
    marks: () => report.generations.length,
  },
};

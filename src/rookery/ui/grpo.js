// The charts of a grpo report: rewards over the steps, one small chart per metric, time by stage.

const metric = (step, name) => step.metrics[name] ?? null;

const tick = (value) =>
  (value !== 0 && Math.abs(value) < 1e-3
    ? value.toExponential(1)
    : String(Number(value.toPrecision(6)))
  ).replace("-", "\u2212");

function stepAxis(colours) {
  return axis(colours, {
    type: "value",
    name: "Step",
    nameGap: 30,
    minInterval: 1,
    axisLine: { show: true, onZero: false, lineStyle: { color: colours.faint } },
  });
}

function line(colours, name, options) {
  return {
    type: "line",
    name,
    symbol: "circle",
    symbolSize: 4,
    showSymbol: report.steps.length <= 200,
    connectNulls: false,
    ...options,
  };
}

// The mean reward of the answers that were drawn, and the checkpoints on the select tasks.
function reward(colours) {
  const base = frame(colours);
  const chosen = (point) => report.checkpoints.find((one) => one.step === point[0])?.is_chosen;
  return {
    ...base,
    grid: { left: 56, right: 24, top: 48, bottom: 52 },
    legend: { top: 0, right: 0, icon: "circle", textStyle: { color: colours.muted } },
    tooltip: {
      ...base.tooltip,
      trigger: "item",
      formatter: ({ seriesName, value }) =>
        tip(`Step ${value[0]}`, [[seriesName, score(value[1])]]),
    },
    xAxis: stepAxis(colours),
    yAxis: upright(colours, "Reward", { scale: true }),
    series: [
      line(colours, "drawn answers", {
        data: report.steps.map((step) => [step.step, metric(step, "reward/mean")]),
        lineStyle: { color: colours.faint, width: 1.5 },
        itemStyle: { color: colours.faint },
      }),
      line(colours, "select tasks", {
        data: report.checkpoints.map((one) => [one.step, one.mean]),
        showSymbol: true,
        symbolSize: (point) => (chosen(point) ? 12 : 6),
        lineStyle: { color: colours.accent, width: 2.25 },
        itemStyle: { color: colours.accent },
        z: 3,
      }),
    ],
  };
}

// The same of every adapter of a sweep, over one another.
function sweep(colours) {
  const base = frame(colours);
  const adapters = [...report.sweep.adapters].reverse();
  return {
    ...base,
    grid: { left: 56, right: 24, top: 20, bottom: 52 },
    tooltip: {
      ...base.tooltip,
      trigger: "item",
      formatter: ({ seriesName, value }) =>
        tip(`Step ${value[0]}`, [[seriesName, score(value[1])]]),
    },
    xAxis: stepAxis(colours),
    yAxis: upright(colours, "Reward", { scale: true }),
    series: adapters.map((one) => {
      const color = one.is_chosen ? colours.accent : colours.faint;
      return line(colours, one.name, {
        data: one.rewards.map((value, step) => [step, value]),
        lineStyle: { color, width: one.is_chosen ? 2.25 : 1 },
        itemStyle: { color },
        z: one.is_chosen ? 3 : 2,
      });
    }),
  };
}

function panel(colours, { name }) {
  const base = frame(colours);
  return {
    ...base,
    grid: { left: 64, right: 16, top: 20, bottom: 48 },
    tooltip: {
      ...base.tooltip,
      trigger: "item",
      formatter: ({ value }) => tip(`Step ${value[0]}`, [[name, value[1].toPrecision(4)]]),
    },
    xAxis: stepAxis(colours),
    yAxis: upright(colours, "", {
      scale: true,
      axisLabel: { color: colours.muted, fontSize: 12, hideOverlap: true, formatter: tick },
    }),
    series: [
      line(colours, name, {
        data: report.steps.map((step) => [step.step, metric(step, name)]),
        lineStyle: { color: colours.accent, width: 1.75 },
        itemStyle: { color: colours.accent },
      }),
    ],
  };
}

function stages(colours) {
  const base = frame(colours);
  const shades = [colours.accent, colours.faint, colours.muted, colours.ink];
  return {
    ...base,
    grid: { left: 56, right: 24, top: 48, bottom: 52 },
    legend: { top: 0, right: 0, icon: "circle", textStyle: { color: colours.muted } },
    tooltip: {
      ...base.tooltip,
      trigger: "item",
      formatter: ({ seriesName, name, value }) =>
        tip(`Step ${name}`, [[seriesName, `${value.toFixed(2)} s`]]),
    },
    xAxis: axis(colours, {
      type: "category",
      name: "Step",
      nameGap: 30,
      data: report.steps.map((step) => String(step.step)),
    }),
    yAxis: upright(colours, "Seconds"),
    series: report.stages.map((name, i) => ({
      type: "bar",
      name: name.slice("time/".length, -"_s".length),
      stack: "seconds",
      data: report.steps.map((step) => metric(step, name)),
      itemStyle: { color: shades[i % shades.length] },
      emphasis: { disabled: true },
    })),
  };
}

const numSteps = () => report.steps.length;
const kinds = {
  reward: { draw: reward, size: () => ({ height: 340 }), marks: () => numSteps() * 2 },
  sweep: {
    draw: sweep,
    size: () => ({ height: 340 }),
    marks: () => numSteps() * report.sweep.adapters.length,
  },
  stages: { draw: stages, size: () => ({ height: 260 }), marks: () => numSteps() * 3 },
};
for (const box of document.querySelectorAll("[data-metric]")) {
  const name = box.dataset.metric;
  kinds[box.dataset.chart] = {
    draw: (colours) => panel(colours, { name }),
    size: () => ({ height: 220 }),
    marks: numSteps,
  };
}

// Shared parts of all charts: the library, colours, axes, tooltips, drawing once visible.

import { h } from "./dom.js";
import { compact, number } from "./words.js";

// Distinguishable without colour vision, with enough contrast to their background.
const HUES = ["#d55e00", "#1f3b9b", "#cf78b0", "#e0a000", "#4fb3e8", "#6b4326"];
const DARK_HUES = ["#f0803c", "#4f7df0", "#c74fb0", "#f5d565", "#f2f0ec", "#8a6240"];

let loading = null;

// Loads the chart library, which is large, when the first run is opened.
export function library() {
  if (globalThis.echarts) return Promise.resolve(withEdges(globalThis.echarts));
  loading ??= new Promise((done, failed) => {
    const script = h("script", { src: `/static/echarts.js?v=${document.documentElement.dataset.version}`, async: true });
    script.onload = () => done(withEdges(globalThis.echarts));
    script.onerror = () => failed(new Error("The chart library could not be loaded."));
    document.head.append(script);
  });
  return loading;
}

// Registers a shape of many straight lines: thousands of shapes would move too slowly.
function withEdges(echarts) {
  const buildPath = (drawing, { lines }) => lines.forEach(([x1, y1, x2, y2]) => { drawing.moveTo(x1, y1); drawing.lineTo(x2, y2); });
  echarts.graphic.getShapeClass("edges") ?? echarts.graphic.registerShape("edges", echarts.graphic.extendShape({ buildPath }));
  return echarts;
}

// A series of lines in axis coordinates: [[x1, y1, x2, y2], ...].
export function edgeSeries(edges, style) {
  const renderItem = ({ context }, { coord }) => {
    if (context.isDrawn) return undefined;
    context.isDrawn = true;
    return { type: "edges", shape: { lines: edges.map(([x1, y1, x2, y2]) => [...coord([x1, y1]), ...coord([x2, y2])]) }, style: { fill: null, ...style } };
  };
  return { type: "custom", silent: true, z: 1, data: edges.slice(0, 1), renderItem };
}

function palette() {
  const style = getComputedStyle(document.documentElement);
  const names = ["ground", "raised", "ink", "muted", "faint", "line", "accent", "wash"];
  const colours = Object.fromEntries(names.map((n) => [n, style.getPropertyValue(`--${n}`).trim()]));
  colours.hues = [colours.accent, ...(matchMedia("(prefers-color-scheme: dark)").matches ? DARK_HUES : HUES)];
  return colours;
}

// A tooltip made of nodes, so that text of a run never becomes markup.
export function tip(title, pairs) {
  const rows = pairs.flatMap(([term, detail]) => [h("dt", null, term), h("dd", null, detail)]);
  return h("div", { class: "tip" }, h("b", null, title), h("dl", null, rows));
}

export function frame(colours) {
  const font = getComputedStyle(document.body).fontFamily;
  return {
    animation: false,
    backgroundColor: "transparent",
    textStyle: { fontFamily: font, color: colours.ink },
    tooltip: {
      confine: true,
      transitionDuration: 0,
      backgroundColor: colours.raised,
      borderColor: colours.line,
      borderWidth: 1,
      padding: [8, 12],
      textStyle: { color: colours.ink, fontFamily: font },
      extraCssText: "box-shadow: 0 4px 16px rgb(0 0 0 / 0.12); border-radius: 6px;",
    },
  };
}

export function axis(colours, options) {
  return {
    nameLocation: "middle",
    nameTextStyle: { color: colours.muted, fontSize: 12 },
    axisLabel: { color: colours.muted, fontSize: 12, hideOverlap: true },
    axisLine: { show: false, onZero: false }, // otherwise the axis name is placed at zero
    axisTick: { show: false },
    splitLine: { show: false },
    ...options,
  };
}

export function upright(colours, name, options) {
  return axis(colours, {
    type: "value",
    scale: true,
    name,
    nameLocation: "end",
    nameGap: 12,
    nameTextStyle: { color: colours.muted, fontSize: 12, align: "left", padding: [0, 0, 0, -40] },
    axisLabel: { color: colours.muted, fontSize: 12, hideOverlap: true, formatter: tick },
    splitLine: { show: true, lineStyle: { color: colours.line } },
    ...options,
  });
}

export function tick(value) {
  if (typeof value !== "number") return value; // a category name
  const size = Math.abs(value);
  const shown = size !== 0 && (size >= 1e5 || size < 1e-3) ? Number(value.toPrecision(3)).toExponential() : String(Number(value.toPrecision(9)));
  return shown.replace("-", "\u2212");
}

export const flat = (colours, name, options) =>
  axis(colours, {
    type: "value",
    name,
    nameGap: 26,
    min: "dataMin",
    max: "dataMax",
    axisLine: { show: true, onZero: false, lineStyle: { color: colours.faint } },
    ...options,
  });

// A chart drawn once it is visible; it adapts to colour scheme and width. `option(colours, width)`
// returns the ECharts option; `redraw()` calls it again. A zoomed chart keeps its range, double-click
// shows all, and `onzoom(first, last)` is called with the visible range.
export class Chart {
  constructor({ label, height = 260, option, ready, onzoom }) {
    this.option = option;
    this.onzoom = onzoom;
    this.isZoomed = false;
    this.ready = ready;
    this.isSeen = false;
    this.box = h("div", { class: "chart", role: "img", "aria-label": label });
    this.box.style.height = `${height}px`;
    this.seeing = new IntersectionObserver((entries) => this.see(entries.at(-1).isIntersecting), { rootMargin: "200px" });
    this.seeing.observe(this.box);
    this.sizing = new ResizeObserver(() => this.chart && this.chart.getWidth() !== this.box.clientWidth && this.fit());
    this.sizing.observe(this.box);
    this.scheme = matchMedia("(prefers-color-scheme: dark)");
    this.onScheme = () => this.redraw();
    this.scheme.addEventListener("change", this.onScheme);
  }

  see(isSeen) {
    this.isSeen = isSeen;
    if (isSeen && this.isStale !== false) this.redraw();
  }

  fit() {
    this.chart.resize();
    this.redraw();
  }

  async redraw() {
    this.isStale = true;
    if (!this.isSeen) return;
    const echarts = await library();
    if (this.isClosed || !this.box.isConnected || !this.box.clientWidth) return;
    if (!this.chart) {
      this.chart = echarts.init(this.box, null, { renderer: "canvas" });
      this.ready?.(this.chart);
      this.chart.on("datazoom", () => this.tellZoom());
      this.chart.getZr().on("dblclick", () => this.isZoomed && this.chart.dispatchAction({ type: "dataZoom", start: 0, end: 100 }));
    }
    const [startValue, endValue] = (this.isZoomed && this.zoom.getValueRange()) || []; // in shares it would move with what comes
    const option = this.option(palette(), this.box.clientWidth);
    if (this.isZoomed) option.dataZoom = option.dataZoom.map((one) => ({ ...one, startValue, endValue }));
    this.chart.setOption(option, { notMerge: true });
    this.isStale = false;
  }

  get zoom() {
    return this.chart.getModel().getComponent("dataZoom", 0);
  }

  tellZoom() {
    const [start, end] = this.zoom.getPercentRange();
    const [first, last] = this.zoom.getValueRange();
    this.isZoomed = start > 0 || end < 100;
    this.onzoom?.(Math.floor(first), Math.ceil(last));
  }

  close() {
    this.isClosed = true;
    this.seeing.disconnect();
    this.sizing.disconnect();
    this.scheme.removeEventListener("change", this.onScheme);
    this.chart?.dispose();
  }
}

// Lines over steps: series is [{ name, points: [[x, y], ...], band, isMarked, isStacked }]. Ctrl and
// the wheel zoom, dragging moves; `onzoom(first, last)` may fetch more points of the visible range.
export function lineChart({ label, height = 220, series, x = "Step", onzoom }) {
  let lines = series;
  const chart = new Chart({ label, height, onzoom, option: (colours) => lineOption(colours, lines, x) });
  chart.setSeries = (next) => {
    lines = next;
    chart.redraw();
  };
  return chart;
}

function lineOption(colours, series, x) {
  const base = frame(colours);
  const isMany = series.length > 1;
  return {
    ...base,
    grid: { left: 48, right: 14, top: isMany ? 34 : 14, bottom: 40 },
    legend: isMany
      ? { type: "scroll", top: 0, left: 0, padding: [7, 5, 3, 5], itemWidth: 14, itemHeight: 8, textStyle: { color: colours.muted, fontSize: 12 } }
      : undefined,
    tooltip: {
      ...base.tooltip,
      trigger: "axis",
      axisPointer: { type: "line", lineStyle: { color: colours.faint, type: "solid" } },
      formatter: (items) => tip(`${x} ${items[0].axisValue}`, items.filter((i) => i.componentSubType === "line").map((i) => [i.seriesName, number(i.value[1], 4)])),
    },
    xAxis: flat(colours, x, { minInterval: 1 }),
    yAxis: upright(colours, "", { scale: !series.some((line) => line.isStacked) }),
    dataZoom: [{ type: "inside", throttle: 0, xAxisIndex: 0, filterMode: "none", zoomOnMouseWheel: "ctrl", moveOnMouseMove: true, minValueSpan: 2 }],
    series: series.flatMap((line, k) => {
      const colour = colours.hues[k % colours.hues.length];
      const drawn = {
        type: "line",
        name: line.name,
        data: line.points,
        symbol: "circle",
        symbolSize: line.isMarked ? 8 : 5,
        showSymbol: line.isMarked || line.points.length < 2,
        connectNulls: false,
        lineStyle: { color: colour, width: 1.75 },
        itemStyle: { color: colour },
        areaStyle: line.isStacked ? { opacity: 0.55 } : undefined,
        stack: line.isStacked ? "all" : undefined,
        z: 3,
      };
      return line.band?.length ? [bandSeries(line.band, colour), drawn] : [drawn];
    }),
  };
}

// A filled band between two values per step: [[x, low, high], ...].
function bandSeries(band, colour) {
  return {
    type: "custom",
    silent: true,
    z: 1,
    data: band.flatMap(([x, low, high]) => [[x, low], [x, high]]), // extends the axes to the band
    renderItem: (params, api) => {
      if (params.context.isDrawn) return undefined;
      params.context.isDrawn = true;
      const points = [...band.map(([x, , high]) => api.coord([x, high])), ...band.map(([x, low]) => api.coord([x, low])).reverse()];
      return { type: "polygon", shape: { points }, style: { fill: colour, opacity: 0.13 } };
    },
  };
}

// Stacked bars over names: series is [{ name, values }]; `mark` is the index of the only coloured
// bar. Horizontal bars (`isLying`) have their names on the left.
export function barChart({ label, height = 250, x, y = "", isLying = false, bars, onpick }) {
  const option = (colours, width) => {
    const { names, series, mark, most } = bars();
    const base = frame(colours);
    const shades = [colours.accent, colours.faint, ...colours.hues.slice(1)];
    const colour = (k, place) => (mark === undefined ? shades[k % shades.length] : place === mark ? colours.accent : colours.faint);
    const byName = isLying
      ? axis(colours, { type: "category", inverse: true, data: names, axisLabel: { color: colours.ink, fontSize: 12, interval: 0, width: Math.min(150, width * 0.36), overflow: "truncate" } })
      : axis(colours, { type: "category", name: x, nameGap: 28, data: names, axisLine: { show: true, onZero: false, lineStyle: { color: colours.faint } } });
    const byValue = isLying
      ? axis(colours, { type: "value", name: x, nameGap: 26, min: most ? 0 : undefined, max: most, interval: most && most / 4, axisLabel: { color: colours.muted, fontSize: 12, formatter: most ? tick : compact, hideOverlap: true }, splitLine: { show: true, lineStyle: { color: colours.line } } })
      : upright(colours, y, { scale: false, minInterval: 1, axisLabel: { color: colours.muted, fontSize: 12, formatter: compact } });
    return {
      ...base,
      grid: { left: isLying ? Math.min(158, width * 0.4) : 52, right: isLying ? 56 : 14, top: isLying ? 10 : series.length > 1 ? 44 : 32, bottom: 46 },
      legend: series.length > 1 ? { top: 0, right: 0, icon: "circle", textStyle: { color: colours.muted } } : undefined,
      tooltip: { ...base.tooltip, formatter: ({ name, seriesName, value }) => tip(name, [[seriesName, number(value)]]) },
      xAxis: isLying ? byValue : byName,
      yAxis: isLying ? byName : byValue,
      series: series.map((one, k) => ({
        type: "bar", name: one.name, stack: "all", barMaxWidth: isLying ? 18 : 44, barCategoryGap: "20%", emphasis: { disabled: true }, itemStyle: { color: colour(k, -2) },
        data: one.values.map((value, place) => ({ value, itemStyle: { color: colour(k, place), borderRadius: 2 } })),
        label: { show: isLying, position: "right", fontSize: 12, color: colours.muted, formatter: ({ value }) => (most ? number(value) : compact(value)) },
      })),
    };
  };
  return new Chart({ label, height, option, ready: onpick && ((drawn) => drawn.on("click", ({ dataIndex }) => onpick(dataIndex))) });
}

// Points of a sparkline, for an SVG polyline.
export function sparkPoints(values, width, height) {
  const low = Math.min(...values);
  const range = Math.max(...values) - low || 1;
  const step = values.length > 1 ? (width - 4) / (values.length - 1) : 0;
  return values.map((v, k) => `${(2 + k * step).toFixed(1)},${(height - 3 - ((v - low) / range) * (height - 6)).toFixed(1)}`).join(" ");
}

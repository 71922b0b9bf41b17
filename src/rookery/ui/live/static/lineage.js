// The ancestry of a candidate: a column per generation, best on top, lines from parents to children.

import { Chart, axis, frame, tip, upright } from "./charts.js";
import { isNumber, number, score } from "./words.js";

const MOST_DRAWN = 3000;

export function ancestry(candidates, id) {
  const seen = new Set();
  const open = [id];
  while (open.length) {
    const one = open.pop();
    if (seen.has(one)) continue;
    seen.add(one);
    open.push(...(candidates.get(one)?.parents ?? []));
  }
  return seen;
}

function layOut(candidates, kept) {
  const rows = [...candidates.values()].filter((c) => kept.has(c.id)).slice(-MOST_DRAWN);
  const generations = [...new Set(rows.map((c) => c.generation ?? Infinity))].sort((a, b) => a - b);
  const columns = generations.map((g) => rows.filter((c) => (c.generation ?? Infinity) === g).sort((a, b) => (b.score ?? -Infinity) - (a.score ?? -Infinity)));
  const nodes = columns.flatMap((column, x) => column.map((c, y) => ({ ...c, x, y })));
  const index = new Map(nodes.map((n) => [n.id, n]));
  const edges = nodes.flatMap((n) => (n.parents ?? []).filter((p) => index.has(p)).map((p) => [index.get(p), n]));
  const isFounders = (column) => column.every((c) => c.operator === "founder");
  const names = generations.map((g, k) => (isFounders(columns[k]) ? "founders" : Number.isFinite(g) ? String(g) : "next"));
  return { nodes, edges, names, depth: Math.max(1, ...columns.map((c) => c.length)) };
}

export class Lineage {
  constructor({ onpick }) {
    this.isWhole = false;
    this.chart = new Chart({
      label: "Candidates by generation, joined to their parents",
      height: 300,
      option: (colours, width) => this.option(colours, width),
      ready: (drawn) => drawn.on("click", ({ seriesIndex, dataIndex }) => seriesIndex === 1 && onpick(this.placed.nodes[dataIndex].id)),
    });
  }

  // `weights` has, by candidate, the share of each parent in the order of `parents`.
  set(candidates, head, isWhole, weights) {
    Object.assign(this, { candidates, head, isWhole, weights });
    this.line = ancestry(candidates, head);
    const kept = isWhole ? new Set(candidates.keys()) : this.line;
    this.placed = layOut(candidates, kept);
    this.chart.box.style.height = `${Math.max(170, Math.min(640, this.placed.depth * 34 + 90))}px`;
    this.chart.chart?.resize();
    this.chart.redraw();
  }

  option(colours, width) {
    const base = frame(colours);
    const { nodes, edges, names, depth } = this.placed ?? { nodes: [], edges: [], names: [], depth: 1 };
    const room = (width - 90) / Math.max(1, names.length);
    return {
      ...base,
      grid: { left: 40, right: 24, top: 34, bottom: 44 },
      tooltip: { ...base.tooltip, formatter: ({ dataIndex }) => candidateTip(nodes[dataIndex], this.weights) },
      xAxis: axis(colours, { type: "category", name: "Generation", nameGap: 26, data: names, axisLine: { show: true, lineStyle: { color: colours.faint } } }),
      yAxis: upright(colours, "Rank", { type: "category", inverse: true, nameLocation: "start", splitLine: { show: false }, data: Array.from({ length: depth }, (_, y) => String(y + 1)) }),
      series: [this.edgeSeries(edges, colours), this.nodeSeries(nodes, colours, room, depth)],
    };
  }

  edgeSeries(edges, colours) {
    const quiet = Math.max(0.1, Math.min(0.5, 5 / Math.sqrt(edges.length || 1)));
    return {
      type: "custom",
      silent: true,
      z: 1,
      data: edges.map(([from]) => [from.x, from.y]),
      renderItem: (params, api) => {
        const [from, to] = edges[params.dataIndex];
        const [x1, y1] = api.coord([from.x, from.y]);
        const [x2, y2] = api.coord([to.x, to.y]);
        const isMarked = this.line.has(to.id) && this.line.has(from.id);
        const share = this.weights[to.id]?.[to.parents.indexOf(from.id)] ?? 0.5;
        const width = 0.75 + 2 * Math.min(1, Math.abs(share));
        const middle = x1 === x2 ? x1 - 14 : (x1 + x2) / 2;
        return {
          type: "bezierCurve",
          shape: { x1, y1, x2, y2, cpx1: middle, cpy1: y1, cpx2: middle, cpy2: y2 },
          style: { fill: null, stroke: isMarked ? colours.accent : colours.faint, opacity: isMarked ? 0.8 : quiet, lineWidth: isMarked ? width : width * 0.6 },
        };
      },
    };
  }

  nodeSeries(nodes, colours, room, depth) {
    const size = Math.max(4, Math.min(11, room / 4, 420 / depth));
    return {
      type: "scatter",
      z: 3,
      data: nodes.map((node) => {
        const isMarked = this.line.has(node.id);
        return {
          value: [node.x, node.y],
          symbolSize: node.id === this.head ? size * 1.6 : size,
          itemStyle: { color: isMarked ? colours.accent : colours.faint, borderColor: colours.ground, borderWidth: 1 },
          label: { show: node.id === this.head || (isMarked && room > 90 && depth < 12), formatter: () => node.id, position: "top", distance: 4, fontSize: 11, color: colours.muted, width: Math.max(60, room - 8), overflow: "truncate", textBorderColor: colours.ground, textBorderWidth: 3 },
        };
      }),
    };
  }
}

export function candidateTip(c, weights = {}) {
  const pairs = c.operator === "founder" ? [["founder", ""]] : [["made by", c.operator || "–"]];
  (c.parents ?? []).slice(0, 6).forEach((p, k) => pairs.push([`from ${p}`, isNumber(weights[c.id]?.[k]) ? `× ${number(weights[c.id][k], 2)}` : ""]));
  pairs.push(["generation", String(c.generation ?? "now")], ["score", score(c.score)], ["tasks", String(c.num_tasks ?? "–")]);
  if (c.error) pairs.push(["failed", c.error.slice(0, 80)]);
  return tip(c.id, pairs);
}

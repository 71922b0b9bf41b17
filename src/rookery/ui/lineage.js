// The lineage: every candidate in the column of its generation, joined to its parents.

const FOUNDER = "founder"; // the operator of those who were there before the search
const LINEAGE_COLUMN_PX = 18; // below this, columns cannot be told apart: scroll instead

// Places every candidate at (column of its generation, rank by score) and finds its parents.
// Parents that the report does not list were there before the first generation.
function layout() {
  const listed = new Map(report.lineage.map((c) => [c.id, c]));
  const first = Math.min(...report.lineage.map((c) => c.generation));
  const wanted = report.lineage.flatMap((c) =>
    c.parents.filter((p) => !listed.has(p)).map((p) => [p, c.is_ancestor || c.is_winner]),
  );
  const founders = new Map();
  for (const [id, isAncestor] of wanted) founders.set(id, isAncestor || founders.get(id) || false);
  const all = [
    ...[...founders].map(([id, isAncestor]) => ({
      id, generation: first - 1, operator: FOUNDER, parents: [], weights: [], score: null,
      is_winner: false, is_ancestor: isAncestor,
    })),
    ...report.lineage,
  ];
  const generations = [...new Set(all.map((c) => c.generation))].sort((a, b) => a - b);
  const height = (c) => c.score ?? -Infinity;
  const better = (a, b) => height(b) - height(a) || (a.id < b.id ? -1 : 1);
  const nodes = generations.flatMap((generation, x) =>
    all.filter((c) => c.generation === generation).sort(better).map((c, y) => ({ ...c, x, y })),
  );
  const index = new Map(nodes.map((node, i) => [node.id, i]));
  const edges = nodes.flatMap((node, to) =>
    node.parents.map((parent, k) => {
      return { from: index.get(parent), to, weight: node.weights[k] ?? 0.5 };
    }),
  );
  const isFounders = (g) => nodes.every((n) => n.generation !== g || n.operator === FOUNDER);
  const names = generations.map((g) => (isFounders(g) ? "founders" : String(g)));
  const depth = Math.max(...nodes.map((n) => n.y)) + 1;
  return { nodes, edges: edges.filter((e) => e.from !== e.to), names, depth };
}

function candidateTip(node) {
  const isFounder = node.operator === FOUNDER;
  const pairs = [isFounder ? ["founder", ""] : ["made by", node.operator || "-"]];
  node.parents.forEach((parent, k) => {
    const weight = node.weights[k];
    pairs.push([`from ${parent}`, isNumber(weight) ? `× ${fixed(weight, 2)}` : ""]);
  });
  pairs.push(["score", score(node.score)]);
  if (node.is_winner) pairs.push(["winner", ""]);
  return tip(node.id, pairs);
}

// An S-curve that leaves a parent and enters a child horizontally.
function edgeSeries({ nodes, edges, names }, colours) {
  const quiet = Math.max(0.12, Math.min(0.5, 5 / Math.sqrt(edges.length))); // many lines: a haze
  const isMarked = ({ from, to }) =>
    (nodes[to].is_ancestor || nodes[to].is_winner) && nodes[from].is_ancestor;
  return {
    type: "custom",
    silent: true,
    data: edges.map((edge) => [nodes[edge.from].x, nodes[edge.from].y]),
    renderItem: (params, api) => {
      const edge = edges[params.dataIndex];
      const [x1, y1] = api.coord([nodes[edge.from].x, nodes[edge.from].y]);
      const [x2, y2] = api.coord([nodes[edge.to].x, nodes[edge.to].y]);
      // Parent and child of one generation share a column: the curve bulges out of it.
      const bulge = Math.min(6 + Math.abs(y2 - y1) / 4, params.coordSys.width / names.length / 2);
      const middle = x1 === x2 ? x1 - bulge : (x1 + x2) / 2;
      const marked = isMarked(edge);
      const width = 0.75 + 2 * Math.min(1, Math.abs(edge.weight));
      const stroke = marked ? colours.accent : colours.faint;
      return {
        type: "bezierCurve",
        shape: { x1, y1, x2, y2, cpx1: middle, cpy1: y1, cpx2: middle, cpy2: y2 },
        style: {
          fill: null,
          stroke,
          opacity: marked ? 1 : quiet,
          lineWidth: marked ? width : width * 0.6,
        },
        emphasis: { style: { stroke: colours.ink, opacity: 1 } },
        z2: marked ? 2 : 1,
      };
    },
    z: 2,
  };
}

function nodeSeries({ nodes, names, depth }, colours, width) {
  const room = (width - 90) / names.length;
  const size = Math.max(5, Math.min(11, room / 4, 420 / depth));
  return {
    type: "scatter",
    data: nodes.map((node) => {
      const isMarked = node.is_ancestor || node.is_winner;
      const colour = isMarked ? colours.accent : colours.faint;
      const isFounder = node.operator === FOUNDER;
      const isHollow = node.score === null && !isFounder && !isMarked;
      const isNamed = node.is_winner || ((isMarked || isFounder) && room >= 84);
      return {
        value: [node.x, node.y],
        symbolSize: node.is_winner ? size * 1.7 : size,
        itemStyle: {
          opacity: 1,
          color: isHollow ? colours.ground : colour,
          borderColor: isHollow ? colours.faint : colours.ground,
          borderWidth: isHollow ? 1.5 : 1,
        },
        label: {
          show: isNamed,
          formatter: () => node.id,
          position: "top",
          distance: 4,
          fontSize: 11,
          fontWeight: node.is_winner ? 650 : 400,
          color: node.is_winner ? colours.accent : colours.muted,
          textBorderColor: colours.ground,
          textBorderWidth: 3,
          width: Math.max(room - 8, 70),
          overflow: "truncate",
        },
      };
    }),
    emphasis: { scale: false, itemStyle: { color: colours.ink } },
    z: 5,
  };
}

function lineage(colours, { width }) {
  const placed = layout();
  const base = frame(colours);
  const ranks = Array.from({ length: placed.depth }, (_, y) => String(y + 1));
  return {
    ...base,
    grid: { left: 44, right: 20, top: 40, bottom: 52 },
    tooltip: { ...base.tooltip, formatter: (item) => candidateTip(placed.nodes[item.dataIndex]) },
    xAxis: axis(colours, {
      type: "category",
      name: "Generation",
      nameGap: 30,
      data: placed.names,
      axisLine: { show: true, lineStyle: { color: colours.faint } },
    }),
    yAxis: upright(colours, "Rank in the generation", {
      type: "category",
      inverse: true,
      nameLocation: "start",
      data: ranks,
      splitLine: { show: false },
    }),
    series: [edgeSeries(placed, colours), nodeSeries(placed, colours, width)],
  };
}

// Pointing at a candidate marks everything it descends from.
function traceAncestry(chart) {
  const { nodes, edges } = layout();
  const incoming = nodes.map(() => []);
  edges.forEach((edge, i) => incoming[edge.to].push(i));
  chart.on("mouseover", { seriesIndex: 1 }, ({ dataIndex }) => {
    const seen = new Set([dataIndex]);
    const lines = new Set();
    for (const node of seen) {
      for (const i of incoming[node]) {
        lines.add(i);
        seen.add(edges[i].from);
      }
    }
    chart.dispatchAction({ type: "highlight", seriesIndex: 0, dataIndex: [...lines] });
    chart.dispatchAction({ type: "highlight", seriesIndex: 1, dataIndex: [...seen] });
  });
  chart.on("mouseout", () => chart.dispatchAction({ type: "downplay", seriesIndex: [0, 1] }));
}

function lineageSize() {
  const { names, depth } = layout();
  const height = Math.max(220, Math.min(760, depth * 40 + 92));
  return { height, minWidth: names.length * LINEAGE_COLUMN_PX + 64 };
}

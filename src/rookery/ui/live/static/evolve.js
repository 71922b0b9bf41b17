// An evolution of programs: best score, tree, grid, failures, and each program.

import { axis, barChart, Chart, edgeSeries, flat, frame, tip, upright } from "./charts.js";
import { choice, el, emptyNote, errorNote, facts, figure, folded, h, lead, longText, note, place, placed, refill, section, table } from "./dom.js";
import { costsLine, stringTable } from "./report.js";
import { grouped } from "./source.js";
import { LongTable, PLAIN } from "./table.js";
import { clip, compact, count, isNumber, six } from "./words.js";

const LISTED_CELLS = 400;
const MOST_STYLED = 2000; // with more points, ECharts draws them unstyled in one batch, which is faster

const PROGRAM_COLUMNS = [
  { name: "id", label: "Program", class: "run" },
  { name: "score", label: "Score", class: "figure" },
  { name: "island", label: "Island", class: "figure" },
  { name: "parent", label: "Parent", class: "kind" },
  { name: "model", label: "Model", class: "kind" },
  { name: "why", label: "State", class: "payload" },
];

function diffNode(lines) {
  const kind = (line) => (line.startsWith("@@") || line.startsWith("---") || line.startsWith("+++") ? "place" : line.startsWith("+") ? "added" : line.startsWith("-") ? "removed" : "");
  return h("pre", { class: "diff" }, lines.map((line) => [h("span", { class: kind(line) }, line), "\n"]));
}

export class EvolveView {
  constructor({ source, path, view, report }) {
    Object.assign(this, { source, path });
    this.picked = place().query.get("program") ?? "";
    this.by = placed("by", ["evaluations", "tokens"]);
    this.only = placed("only", ["", "committed", "failed"]);
    this.bySelect = choice("Over what", [["evaluations", "over evaluations"], ["tokens", "over tokens"]], this.by, (by) => { this.by = by; note({ by }); this.score.isZoomed = false; this.score.redraw(); });
    this.onlySelect = choice("Which programs", [["", "all programs"], ["committed", "kept"], ["failed", "failed"]], this.only, (only) => { this.only = only; note({ only }); this.arrange(); });
    const pickPoint = (drawn, shown) => drawn.on("click", ({ seriesName, dataIndex }) => this.pick(shown()[seriesName][dataIndex].id));
    this.score = new Chart({ label: "Score of every program, and the best so far", height: 320, option: (c) => this.scoreOption(c), ready: (drawn) => pickPoint(drawn, () => this.shownScores) });
    this.tree = new Chart({ label: "Programs by generation, joined to their parents", height: 320, option: (c) => this.treeOption(c), ready: (drawn) => pickPoint(drawn, () => this.shownNodes) });
    this.staleness = barChart({ label: "Iterations by how many were decided meanwhile", x: "Iterations decided between plan and decision", y: "Iterations", bars: () => this.stalenessBars() });
    [this.results, this.islands, this.failures, this.grids, this.winningLine, this.models, this.costs] = Array.from({ length: 7 }, () => h("div"));
    this.state = h("span", { class: "note" });
    this.table = new LongTable({ columns: PROGRAM_COLUMNS, kind: "programs", label: "Programs", row: (i) => this.cells(i) });
    this.detail = h("div", { class: "detail", "aria-live": "polite" }, emptyNote("Choose a program to read its code and how it came about."));
    this.lead = h("p", { class: "lead" });
    this.element = h("div", null,
      section("The best score", this.lead, h("div", { class: "bar" }, this.bySelect), this.score.box),
      this.results,
      section("Programs", h("div", { class: "bar" }, this.onlySelect, this.state), h("div", { class: "split" }, this.table.element, this.detail)),
      section("The tree", lead("A column for each generation, higher is better. The line of the chosen program, or of the best, is in colour."), this.tree.box),
      this.winningLine, this.grids, this.islands, this.failures, this.models, this.costs);
    this.gridCharts = [];
    this.lineOf = null;
    this.update(view, report);
    if (this.picked) this.pick(this.picked);
  }

  update(view, report) {
    this.programs = view.lists.programs ?? new Map();
    this.all = [...this.programs.values()].sort((a, b) => a.number - b.number);
    this.scored = this.all.filter((p) => isNumber(p.score) && p.decided).sort((a, b) => a.decided - b.decided);
    const kept = this.scored.filter((p) => p.state === "committed");
    this.best = kept.reduce((a, b) => (a && a.score >= b.score ? a : b), null);
    const spent = this.all.reduce((sum, p) => sum + (p.tokens ?? 0), 0);
    this.bySelect.hidden = !spent;
    if (!spent) this.by = "evaluations";
    const demoted = report.num_demoted ? ` ${count(report.num_demoted, "program")} looked like the best and did not hold when scored again.` : "";
    this.lead.textContent = this.best ? `The best is ${this.best.id} with ${six(this.best.score)}, among ${count(this.all.length, "program")}${spent ? `, for ${compact(spent)} tokens` : ""}.${demoted}` : "No program has a score yet.";
    this.nodes = kept.filter((p) => isNumber(p.generation));
    this.drawFailures(report);
    this.drawIslands();
    this.drawModels(report);
    if (this.report !== report) this.drawReport(report);
    if (!report.is_written && this.lineOf !== this.best?.id) this.drawWinningLine(this.line(this.best?.id).reverse());
    this.lineOf = this.best?.id;
    this.arrange();
    this.score.redraw();
    this.tree.redraw();
    if (this.isMissing && this.programs.has(this.picked)) this.pick(this.picked);
  }

  drawReport(report) {
    this.report = report;
    const name = (row) => [h("span", { class: "name" }, row.name), row.note && [" ", h("span", { class: "note" }, row.note)]];
    const searched = { class: "winner", cells: [h("span", { class: "name" }, "evolve"), h("b", null, six(report.best?.score)), count(report.num_iterations), count(report.num_failed)] };
    const others = report.baselines.map((row) => [name(row), h("b", null, six(row.best)), count(row.num_iterations), count(row.num_failed)]);
    const onTasks = report.tasks ? section("On tasks that the search never saw", stringTable(report.summary, 0)) : "";
    this.results.replaceChildren(onTasks, others.length ? section("Beside simpler searches with as much to spend", table(["Search", ["Best score"], ["Iterations"], ["Failed"]], [searched, ...others])) : "");
    if (report.is_written) this.drawWinningLine(report.winning_line);
    this.drawGrid(report);
    const front = report.front.map((row) => [h("button", { class: "plain name", onclick: () => this.pick(row.id) }, row.id), count(row.iteration), ...report.objectives.map((one) => six(row.metrics[one]))]);
    this.costs.replaceChildren(
      front.length ? section(`The front of ${report.objectives.join(", ")}`, lead("Programs that no other beats in every objective."), table(["Program", ["Iteration"], ...report.objectives.map((one) => [one])], front)) : "",
      report.is_written ? section("Staleness and cost", Object.keys(report.staleness).length ? [lead("How many iterations were decided while one was on its way: what it could not see."), this.staleness.box] : "", costsLine(report.summary.costs)) : "");
    this.staleness.redraw();
  }

  // Draws the line from the report or, before it exists, from the programs.
  drawWinningLine(line) {
    const step = (row) => folded([`Iteration ${count(row.iteration ?? row.number)}: `, h("b", null, six(row.score)), row.model ? ` by ${row.model}` : "", row.changes ? h("span", { class: "note" }, ` ${clip(row.changes, 160)}`) : ""], () => this.stepNode(row));
    this.winningLine.replaceChildren(section("The winning line", line.length ? [lead("From the first program to the best, each the parent of the next, with what was changed."), line.map(step)] : emptyNote("There is no best program yet.")));
  }

  stalenessBars() {
    const rows = Object.entries(this.report.staleness).sort(([a], [b]) => Number(a) - Number(b));
    return { names: rows.map(([name]) => name), series: [{ name: "iterations", values: rows.map(([, num]) => num) }] };
  }

  drawIslands() {
    const islands = grouped(this.all.filter((p) => p.number > 0), (p) => p.island ?? 0);
    const best = (ps) => ps.filter((p) => p.state === "committed" && isNumber(p.score)).reduce((a, b) => (a && a.score >= b.score ? a : b), null);
    const line = ([island, ps]) => [`Island ${island}`, count(ps.length), count(ps.filter((p) => p.state === "committed").length), count(ps.filter((p) => p.state === "failed").length), best(ps) ? h("button", { class: "plain", onclick: () => this.pick(best(ps).id) }, `${six(best(ps).score)} (${best(ps).id})`) : "–"];
    refill(this.islands, islands.size ? section("Islands", table(["Island", ["Programs"], ["Kept"], ["Failed"], ["Best"]], [...islands].sort((a, b) => a[0] - b[0]).map(line))) : "");
  }

  // Tabulates models, operators and training; numbers of plays come from the report once it exists.
  drawModels(report) {
    const arms = new Map(report.models.map((arm) => [arm.name, arm]));
    const named = (p) => (arms.has(p.arm) ? p.arm : p.model); // `writer` answers as writer@1f2e
    const models = grouped(this.all.filter(named), named);
    const names = [...new Set([...arms.keys(), ...models.keys()])];
    const line = (name) => {
      const [ps, arm] = [models.get(name) ?? [], arms.get(name) ?? {}];
      return [h("span", { class: "name" }, name), six(arm.weight), count(arm.num_plays ?? ps.length), count(ps.filter((p) => p.state === "committed").length), six(arm.gain), count(ps.reduce((sum, p) => sum + (p.tokens ?? 0), 0) || arm.cost)];
    };
    const operators = report.operators.map((row) => [h("span", { class: "name" }, row.name), count(row.num_given), count(row.num_accepted), count(row.num_improved), six(row.tokens)]);
    const learned = report.learned.flatMap((row) => (row.models.length ? row.models : [{}]).map((model, place) => [
      ...(place ? ["", "", "", "", "", ""] : [row.error || row.name, count(row.iteration), count(row.num_rows), count(row.num_groups), count(row.tokens), six(row.seconds)]),
      h("span", { class: "name" }, model.name ?? ""), count(model.num_plays), six(model.gain), count(model.cost)]));
    refill(this.models,
      names.length ? section("Cost by model", table(["Model", ["Weight"], ["Asked"], ["Kept"], ["Gain"], ["Tokens"]], names.map(line))) : "",
      operators.length ? section("Operators", lead("How children were made. Each operator's share follows its recent improvement of the best score per token."), table(["Operator", ["Given"], ["Accepted"], ["Improved"], ["Tokens"]], operators)) : "",
      learned.length ? section("Learning", lead("Adapters trained on answers of this run, and what each model was given and won from then on."), table(["Training", ["Joined"], ["Answers"], ["Groups"], ["Trained tokens"], ["Seconds"], "Model", ["Asked"], ["Gain"], ["Tokens"]], learned)) : "");
  }

  arrange() {
    this.chosen = this.all.filter((p) => !this.only || p.state === this.only).sort((a, b) => (b.score ?? -Infinity) - (a.score ?? -Infinity) || b.number - a.number);
    this.state.textContent = count(this.chosen.length, "program");
    this.table.resize(this.chosen.length);
  }

  cells(index) {
    const p = this.chosen[index];
    if (!p) return null;
    const why = p.failure ? `${p.failure[0]}: ${p.failure[1]}` : p.state === "committed" ? "kept" : p.state;
    return { key: p.id, class: p.id === this.picked ? "chosen" : "", onclick: () => this.pick(p.id), cells: [el("button", PLAIN, p.id), six(p.score), String(p.island ?? ""), p.parent || "", p.model ?? "", why] };
  }

  line(id) {
    const ancestors = [];
    for (let one = this.programs.get(id); one && !ancestors.includes(one); one = this.programs.get(one.parent)) ancestors.push(one);
    return ancestors;
  }

  scoreOption(colours) {
    const base = frame(colours);
    let spent = 0;
    const spentBy = new Map([...this.all].filter((p) => p.decided).sort((a, b) => a.decided - b.decided).map((p) => [p.id, (spent += p.tokens ?? 0)]));
    const x = (p) => (this.by === "tokens" ? spentBy.get(p.id) : p.decided);
    const [failed, kept] = [true, false].map((isFailed) => this.scored.filter((p) => (p.state === "failed") === isFailed));
    this.shownScores = { programs: kept, failed };
    const rise = [];
    for (const p of kept) if (p.state === "committed" && !(p.score <= rise.at(-1)?.[1])) rise.push([x(p), p.score]);
    if (rise.length) rise.push([x(this.scored.at(-1)), rise.at(-1)[1]]);
    const isLarge = this.scored.length > MOST_STYLED;
    const points = (name, itemStyle) => ({ type: "scatter", name, progressive: 0, large: isLarge && this.shownScores[name].length > 0, largeThreshold: 0, data: this.shownScores[name].map((p) => [x(p), p.score]), symbolSize: isLarge ? 3 : 7, itemStyle });
    return {
      ...base,
      grid: { left: 52, right: 20, top: 16, bottom: 44 },
      tooltip: { ...base.tooltip, formatter: ({ seriesName, dataIndex }) => programTip(this.shownScores[seriesName][dataIndex]) },
      xAxis: flat(colours, this.by === "tokens" ? "Tokens" : "Evaluations", { min: 0, minInterval: 1, axisLabel: { color: colours.muted, fontSize: 12, hideOverlap: true, formatter: (v) => compact(v) } }),
      yAxis: upright(colours, ""),
      dataZoom: [{ type: "inside", throttle: 0, zoomOnMouseWheel: "ctrl", filterMode: "none" }],
      series: [
        { type: "line", name: "best", step: "end", data: rise, showSymbol: rise.length < 3, lineStyle: { color: colours.accent, width: 2.5 }, itemStyle: { color: colours.accent }, z: 4, silent: true },
        points("programs", { color: colours.muted, opacity: 0.6 }),
        points("failed", { color: isLarge ? colours.faint : colours.ground, borderColor: colours.muted, borderWidth: 1.2, opacity: 0.6 }),
      ],
    };
  }

  treeOption(colours) {
    const base = frame(colours);
    const line = new Set(this.line(this.picked || this.best?.id));
    const known = new Map(this.nodes.map((p) => [p.id, p]));
    const edges = this.nodes.filter((p) => known.has(p.parent)).map((p) => [known.get(p.parent), p]);
    const [marked, others] = [true, false].map((isMarked) => this.nodes.filter((p) => line.has(p) === isMarked));
    this.shownNodes = { programs: others, line: marked };
    const lines = (isMarked, style) => edgeSeries(edges.filter(([from, to]) => (line.has(from) && line.has(to)) === isMarked).map(([from, to]) => [from.generation, from.score, to.generation, to.score]), style);
    const points = (name, symbolSize, itemStyle) => ({ type: "scatter", name, z: 3, progressive: 0, large: name !== "line" && this.nodes.length > MOST_STYLED, largeThreshold: 0, data: this.shownNodes[name].map((p) => [p.generation, p.score]), symbolSize, itemStyle });
    return {
      ...base,
      grid: { left: 52, right: 24, top: 16, bottom: 44 },
      tooltip: { ...base.tooltip, formatter: ({ seriesName, dataIndex }) => programTip(this.shownNodes[seriesName][dataIndex]) },
      xAxis: flat(colours, "Generation", { minInterval: 1, min: -0.3, max: (v) => v.max + 0.3, axisLabel: { color: colours.muted, formatter: (v) => (Number.isInteger(v) ? v : "") } }),
      yAxis: upright(colours, ""),
      dataZoom: [{ type: "inside", throttle: 0, zoomOnMouseWheel: "ctrl", filterMode: "none" }],
      series: [
        lines(false, { stroke: colours.faint, lineWidth: 1, opacity: 0.35 }),
        lines(true, { stroke: colours.accent, lineWidth: 2 }),
        points("programs", this.nodes.length > MOST_STYLED ? 3 : 6, { color: colours.muted, opacity: 0.6 }),
        points("line", 10, { color: colours.accent }),
      ],
    };
  }

  drawFailures(report) {
    const kinds = grouped(this.all.filter((p) => p.failure), (p) => p.failure[0]);
    const row = ([kind, ps]) => [h("span", { class: "name" }, kind), count(ps.length), h("button", { class: "plain", onclick: () => this.pick(ps[0].id) }, ps[0].id), clip(ps[0].failure[1], 400)];
    const rows = [...kinds].sort((a, b) => b[1].length - a[1].length).map(row);
    const share = isNumber(report.failed_share) ? `: ${Math.round(100 * report.failed_share)} % of all` : "";
    refill(this.failures, section("Failures", rows.length ? [lead(`Iterations that gave no program${share}. They are recorded and have no score.`), table(["Kind", ["Programs"], "First", "What was said first"], rows)] : emptyNote("No iteration failed.")));
  }

  drawGrid(report) {
    const { cells } = report;
    this.gridCharts.forEach((chart) => chart.close());
    const islands = [...new Set(cells.map((c) => c.island))].sort((a, b) => a - b);
    const scores = cells.map((c) => c.score).filter(isNumber);
    this.gridCharts = islands.map((island) => this.gridChart(cells.filter((c) => c.island === island && isNumber(c.score)), island, report, [Math.min(...scores), Math.max(...scores)]));
    const row = (c) => [`Island ${c.island}`, c.cell, h("button", { class: "plain", onclick: () => this.pick(c.program) }, c.program), six(c.score)];
    this.grids.replaceChildren(section("The grid", cells.length
      ? [lead(`The best program of each cell, by ${report.feature_dimensions.join(" and ")}; ${count(islands.length, "island")}${report.is_written ? `, ${count(report.num_programs, "program")} in the population` : ", as of the last checkpoint"}. The stronger the colour, the higher the score. Click a cell to read its program.`),
          h("div", { class: "panels" }, this.gridCharts.map((chart, k) => figure(`Island ${islands[k]}`, chart))),
          folded("Numbers", () => [table(["Island", "Cell", "Program", ["Score"]], cells.slice(0, LISTED_CELLS).map(row)), cells.length > LISTED_CELLS && emptyNote(`The first ${LISTED_CELLS} of ${count(cells.length)} cells; report.json has them all.`)])]
      : emptyNote(report.is_written ? "The grid is empty." : "The grid of kept programs comes with the first checkpoint.")));
  }

  gridChart(cells, island, report, [low, high]) {
    const [xName = "", yName = ""] = report.feature_dimensions ?? [];
    const [xBins = 10, yBins = 10] = report.bins ?? [];
    const spots = cells.map((c) => [...c.cell.split("-").map(Number), 0].slice(0, 2));
    const names = (n) => Array.from({ length: n }, (_, k) => String(k));
    return new Chart({
      label: `Cells of island ${island}`,
      height: 260,
      ready: (drawn) => drawn.on("click", ({ dataIndex }) => this.pick(cells[dataIndex].program)),
      option: (colours) => ({
        ...frame(colours),
        grid: { left: 44, right: 12, top: 24, bottom: 44 },
        tooltip: { ...frame(colours).tooltip, formatter: ({ dataIndex }) => tip(cells[dataIndex].program, [["score", six(cells[dataIndex].score)], [xName, String(spots[dataIndex][0])], [yName, String(spots[dataIndex][1])]]) },
        xAxis: axis(colours, { type: "category", name: xName, nameGap: 26, data: names(xBins) }),
        yAxis: upright(colours, yName, { type: "category", data: names(yBins), splitLine: { show: false }, axisLabel: { color: colours.muted, fontSize: 12 } }),
        visualMap: { show: false, min: high === low ? low - 1 : low, max: high, inRange: { color: [colours.line, colours.accent] }, dimension: 2 },
        series: [{ type: "heatmap", data: cells.map((c, k) => [...spots[k], c.score]), itemStyle: { borderColor: colours.ground, borderWidth: 1 } }],
      }),
    });
  }

  async pick(id) {
    this.picked = id;
    note({ program: id });
    this.table.refresh();
    this.tree.redraw();
    const p = this.programs.get(id);
    this.isMissing = !p; // its row may arrive later
    if (!p) {
      this.detail.replaceChildren(errorNote(new Error(`There is no program ${id}.`)));
      return;
    }
    try {
      const content = await this.source.get(`${this.path}/program/${encodeURIComponent(id)}`);
      if (this.picked === id) this.drawProgram(p, content);
    } catch (error) {
      this.detail.replaceChildren(errorNote(error));
    }
  }

  drawProgram(p, { code, diff, changes }) {
    const metrics = Object.entries(p.metrics ?? {}).map(([k, v]) => [k, isNumber(v) ? six(v) : clip(v, 120)]);
    const steps = this.line(p.id).slice(1);
    const step = (one) => folded(`${one.id}: ${six(one.score)}`, () => this.stepNode(one));
    this.detail.replaceChildren(
      h("h3", null, p.id, p.parent && h("span", { class: "note" }, ` from ${p.parent}`)),
      p.failure ? h("p", { class: "trouble" }, `${p.failure[0]}: ${p.failure[1]}`) : "",
      facts(metrics),
      changes ? h("p", { class: "note" }, changes) : "",
      p.parent && code && diff.length ? h("details", { open: true }, h("summary", null, "What changed"), diffNode(diff)) : "",
      code ? h("details", { open: !p.parent }, h("summary", null, "Code"), longText("code", code)) : emptyNote("No program was made."),
      steps.length ? h("h4", null, "Along its line") : "",
      ...steps.map(step));
  }

  stepNode(one) {
    const shown = h("div");
    const draw = ({ diff, code }) => {
      const metrics = Object.entries(one.metrics ?? {}).map(([k, v]) => [k, isNumber(v) ? six(v) : clip(v, 120)]);
      shown.replaceChildren(facts(metrics), one.parent && diff.length ? diffNode(diff) : longText("code", code || "Its code is not known."));
    };
    this.source.get(`${this.path}/program/${encodeURIComponent(one.id)}`).then(draw, (error) => shown.replaceChildren(errorNote(error)));
    return shown;
  }

  close() {
    [this.score, this.tree, this.staleness, ...this.gridCharts].forEach((chart) => chart.close());
    this.table.close();
  }
}

function programTip(p) {
  const pairs = [["score", six(p.score)], ["generation", String(p.generation ?? "")], ["island", String(p.island ?? "")], ["parent", p.parent || "–"], ["tokens", count(p.tokens ?? 0)]];
  if (p.failure) pairs.push(["failed", p.failure[0]]);
  return tip(p.id, pairs);
}

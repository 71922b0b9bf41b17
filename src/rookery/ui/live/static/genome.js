// A genome run: baselines, fitness, candidates, ancestry, wins and losses by task, dropped candidates.

import { barChart, Chart, flat, frame, tip, upright } from "./charts.js";
import { el, emptyNote, errorNote, facts, figure, folded, h, lead, longText, note, place, refill, refold, section, table } from "./dom.js";
import { ancestry, candidateTip, Lineage } from "./lineage.js";
import { comparison, costsLine, sampledSection } from "./report.js";
import { listed } from "./source.js";
import { LongTable, PLAIN } from "./table.js";
import { count, isNumber, number, score, seconds } from "./words.js";

const LISTED_GENERATIONS = 200;

const DROPPED_COLUMNS = [
  { name: "id", label: "Candidate", class: "run" },
  { name: "generation", label: "Generation", class: "figure" },
  { name: "operator", label: "Made by", class: "kind" },
  { name: "score", label: "Score", class: "figure" },
  { name: "why", label: "Why", class: "payload" },
];

export class GenomeView {
  constructor({ source, path, view, report }) {
    Object.assign(this, { source, path });
    this.picked = place().query.get("candidate") ?? "";
    this.fitness = new Chart({ label: "Fitness by generation, every candidate a point", height: 360, option: (c) => this.fitnessOption(c), ready: (drawn) => drawn.on("click", (item) => item.seriesName === "candidates" && this.pick(this.points[item.dataIndex].id)) });
    this.finals = new Chart({ label: "Finalists: score on the search tasks against the select tasks", height: 280, option: (c) => this.finalsOption(c), ready: (drawn) => drawn.on("click", ({ dataIndex }) => this.pick(this.finalists[dataIndex].id)) });
    this.lineage = new Lineage({ onpick: (id) => this.pick(id) });
    this.whole = h("input", { type: "checkbox", onchange: () => this.drawLineage() });
    this.lineageLead = h("p", { class: "lead" });
    this.finalsBox = section("Finalists", lead("Their score on the search tasks, which chose them, against the select tasks, which they had not seen."), this.finals.box);
    this.dropped = new LongTable({ columns: DROPPED_COLUMNS, kind: "dropped", label: "Dropped and failed candidates", row: (i) => this.droppedRow(i) });
    this.tokens = barChart({ label: "Tokens used by each generation", x: "Generation", y: "Tokens", bars: () => ({ names: this.generations.map((g) => String(g.generation)), series: [{ name: "tokens", values: this.generations.map((g) => g.num_tokens) }], mark: -1 }) });
    [this.results, this.generationBox, this.ancestryBox, this.tasksets, this.front, this.costs] = Array.from({ length: 6 }, () => h("div"));
    this.droppedLead = lead("");
    this.droppedBox = section("Dropped and failed", this.droppedLead, this.dropped.element);
    this.duelBox = h("div");
    this.detail = h("div", { class: "detail", "aria-live": "polite" });
    this.bars = [];
    this.element = h("div", null,
      this.results,
      section("Fitness per generation", lead("Scores on the search tasks: the best candidate so far, the mean of each generation, the band from its worst to its best, and every candidate as a point. Click one to follow it."), this.fitness.box, this.detail, this.generationBox),
      this.finalsBox,
      section("Where the winner comes from", this.lineageLead, h("label", { class: "switch" }, this.whole, " show every candidate"), this.lineage.chart.box, this.ancestryBox),
      section("Against the best founder, task by task", this.duelBox),
      this.tasksets, this.front, this.droppedBox,
      section("Tokens per generation", lead("What each generation’s evaluations cost, in tokens."), this.tokens.box, this.costs));
    this.update(view, report);
  }

  update(view, report) {
    this.candidates = view.lists.candidates ?? new Map();
    this.generations = listed(view, "generations");
    this.facts = view.facts;
    this.points = [...this.candidates.values()].filter((c) => isNumber(c.score));
    this.best = this.facts.winner || this.points.reduce((a, b) => (a && a.score >= b.score ? a : b), null)?.id || "";
    this.finalists = this.points.filter((c) => isNumber(this.facts.select[c.version]));
    this.finalsBox.hidden = !this.finalists.length;
    if (this.report !== report) this.drawReport(report);
    this.drawGenerations();
    this.drawDropped();
    [this.fitness, this.finals, this.tokens].forEach((chart) => chart.redraw());
    this.drawLineage();
    if (this.picked) this.showPicked();
    const duelists = `${this.picked}/${this.facts.winner}/${this.candidates.size > 1}`;
    if (this.duelists !== duelists) setTimeout(() => this.loadDuel(), 0); // slow with many answers: only if the pair changed, and after the first drawing
    this.duelists = duelists;
  }

  drawReport(report) {
    this.report = report;
    const { rows, sources, tasksets, front } = report;
    const reference = rows.find((row) => row.name === "best founder");
    const costs = rows.map((row) => ({ class: row.is_winner ? "winner" : null, cells: [h("span", { class: "name" }, row.name), count(row.num_candidates), count(row.num_tokens), seconds(row.seconds)] }));
    this.results.replaceChildren(section("The winner beside its baselines", rows.length
      ? [lead(["Accuracy on the report tasks, with 95 % intervals.", h("span", { class: "plot-only" }, " The dashed line is the best founder.")]),
          comparison({ rows, name: "Method", what: "Accuracy", gain: "Gain over best founder", reference }),
          rows.some((row) => row.num_candidates) && folded("Cost of each method", () => table(["Method", ["Candidates tried"], ["Tokens"], ["Time"]], costs))]
      : emptyNote("Nothing is measured on the report tasks yet.")), sampledSection(report));
    this.bars.forEach((chart) => chart.close());
    this.bars = sources.map((source) => this.sourceChart(source, rows));
    const isWeighted = new Set(tasksets.map((t) => t.weight)).size > 1;
    const notes = (source) => tasksets.filter((t) => t.name === source).map((t) => h("span", { class: "note" }, tasksWords(t) + (isWeighted && isNumber(t.weight) ? `, weight ${t.weight}` : "")));
    const numbers = rows.map((row) => ({ class: row.is_winner ? "winner" : null, cells: [h("span", { class: "name" }, row.name), ...sources.map((source) => score(row.by_source[source]))] }));
    this.tasksets.replaceChildren(section("Accuracy by taskset", sources.length
      ? [lead("Every method on the report tasks of each taskset."),
          h("div", { class: "panels" }, sources.map((source, k) => figure([source, " ", notes(source)], this.bars[k]))),
          folded("Numbers", () => table(["Method", ...sources.map((source) => [source])], numbers))]
      : emptyNote("Nothing is measured on the report tasks yet.")));
    const scored = Object.keys(front[0]?.by_source ?? {});
    const line = (c) => [h("button", { class: "plain name", onclick: () => this.pick(c.id) }, c.id), score(c.score), ...scored.map((source) => score(c.by_source[source]))];
    this.front.replaceChildren(...(front.length > 1 ? [section("The Pareto front", lead("Candidates that no other one beats on every taskset, on the search tasks. Those of the last population are in the run’s folder; the others can be rebuilt."), table(["Candidate", ["Score"], ...scored.map((source) => [source])], front.map(line)))] : []));
    this.costs.replaceChildren(costsLine(report.summary.costs));
  }

  sourceChart(source, rows) {
    const values = rows.map((row) => row.by_source[source] ?? null);
    const isFraction = values.every((v) => v === null || (v >= 0 && v <= 1));
    return barChart({ label: `Accuracy of every method on ${source}`, height: rows.length * 27 + 60, x: "Accuracy", isLying: true, bars: () => ({ names: rows.map((row) => row.name), series: [{ name: source, values }], mark: rows.findIndex((row) => row.is_winner), most: isFraction ? 1 : undefined }) });
  }

  drawGenerations() {
    const shown = this.generations.slice(-LISTED_GENERATIONS);
    const line = (g) => [String(g.generation), score(g.best), score(g.mean), score(g.worst), ...[g.num_candidates, g.num_dropped, g.num_failed, g.num_tokens].map((n) => count(n)), seconds(g.seconds)];
    if (!shown.length) this.generationBox.replaceChildren(emptyNote("No generation is finished yet."));
    else refold(this.generationBox, "Numbers", () => [table([["Generation"], ["Best"], ["Mean"], ["Worst"], ["Candidates"], ["Dropped"], ["Failed"], ["Tokens"], ["Time"]], shown.map(line)), shown.length < this.generations.length && emptyNote(`The last ${shown.length} of ${count(this.generations.length)} generations.`)]);
  }

  drawDropped() {
    this.out = [...this.candidates.values()].filter((c) => c.error || c.num_tasks < this.facts.num_tasks);
    this.droppedBox.hidden = !this.candidates.size;
    const failed = this.out.filter((c) => c.error).length;
    const said = this.out.length ? `${count(this.out.length - failed)} were dropped by the race before they had answered all ${count(this.facts.num_tasks)} search tasks, ${count(failed)} failed.` : "None: every candidate answered all search tasks.";
    refill(this.droppedLead, said);
    this.dropped.element.hidden = !this.out.length; // it stays where it is: what is moved scrolls to its top
    this.dropped.resize(this.out.length);
  }

  drawLineage() {
    const head = this.candidates.has(this.picked) ? this.picked : this.best;
    if (!head) return;
    const what = head === this.facts.winner ? `the winner, ${head},` : head === this.picked ? head : `${head}, the best so far,`;
    this.lineageLead.textContent = `What ${what} descends from: a column for each generation, the best candidate on top; lines lead from parents to children, thicker for a larger share. Click a candidate to follow another one.`;
    const { weights } = this.report;
    this.lineage.set(this.candidates, head, this.whole.checked, weights);
    const line = [...ancestry(this.candidates, head)].map((id) => this.candidates.get(id)).filter(Boolean).sort((a, b) => (a.generation ?? Infinity) - (b.generation ?? Infinity));
    const parents = (c) => (c.parents ?? []).map((p, k) => [k ? ", " : "", p, isNumber(weights[c.id]?.[k]) && h("span", { class: "interval" }, ` × ${number(weights[c.id][k], 2)}`)]);
    const row = (c) => ({ class: c.id === head ? "winner" : null, cells: [h("span", { class: "name" }, c.id), String(c.generation ?? "now"), c.operator, parents(c), score(c.score)] });
    refold(this.ancestryBox, "The ancestry as a list", () => table(["Candidate", ["Generation"], "Made by", "From", ["Score"]], line.map(row)));
  }

  pick(id) {
    this.picked = id;
    note({ candidate: id });
    this.showPicked();
    this.drawLineage();
    this.loadDuel();
  }

  showPicked() {
    const c = this.candidates.get(this.picked);
    if (!c) return;
    const clear = h("button", { class: "plain", onclick: () => { this.picked = ""; note({ candidate: "" }); this.detail.replaceChildren(); this.drawLineage(); this.loadDuel(); } }, "clear");
    const pairs = [["made by", c.operator], ["from", (c.parents ?? []).join(", ")], ["search score", number(c.score)], ["select score", number(this.facts.select[c.version])], ["tasks answered", count(c.num_tasks)], ["failed", c.error]];
    refill(this.detail, h("h3", null, c.id, " ", clear), facts(pairs.filter(([, v]) => v && v !== "–")));
  }

  droppedRow(index) {
    const c = this.out[index];
    if (!c) return null;
    const why = c.error || `after ${count(c.num_tasks)} of ${count(this.facts.num_tasks)} tasks`;
    return { key: c.id, onclick: () => this.pick(c.id), cells: [el("button", { class: "plain name" }, c.id), String(c.generation ?? ""), c.operator, number(c.score), why] };
  }

  fitnessOption(colours) {
    const base = frame(colours);
    const done = this.generations.filter((g) => isNumber(g.best));
    const last = (done.at(-1)?.generation ?? 0) + 1;
    const line = (name, key, colour, width) => ({ type: "line", name, data: done.filter((g) => isNumber(g[key])).map((g) => [g.generation, g[key]]), symbolSize: width * 2.4, showSymbol: done.length <= 40, lineStyle: { color: colour, width }, itemStyle: { color: colour }, z: 4, endLabel: { show: true, formatter: name, color: colour, fontSize: 12, fontWeight: 600, lineHeight: 20 }, labelLayout: { moveOverlap: "shiftY" } });
    let best = -Infinity;
    const soFar = done.map((g) => ({ generation: g.generation, best: (best = Math.max(best, g.best)) }));
    const isLarge = this.points.length > 2000;
    return {
      ...base,
      grid: { left: 48, right: 60, top: 34, bottom: 44 },
      tooltip: { ...base.tooltip, formatter: (item) => this.fitnessTip(item) },
      xAxis: flat(colours, "Generation", { minInterval: 1, min: (v) => Math.min(0, v.min) - 0.3, max: (v) => v.max + 0.3, axisLabel: { color: colours.muted, formatter: (v) => (Number.isInteger(v) ? v : "") } }),
      yAxis: upright(colours, "Score on the search tasks", { scale: true }),
      dataZoom: [{ type: "inside", throttle: 0, zoomOnMouseWheel: "ctrl", filterMode: "none" }],
      series: [
        { type: "line", name: "worst", data: done.filter((g) => isNumber(g.worst)).map((g) => [g.generation, Math.min(g.worst, ...(g.scores ?? []).filter(isNumber))]), lineStyle: { opacity: 0 }, showSymbol: false, stack: "band", silent: true, stackStrategy: "all" },
        { type: "line", name: "band", data: done.filter((g) => isNumber(g.worst)).map((g) => { const s = (g.scores ?? []).filter(isNumber); return [g.generation, Math.max(g.mean ?? g.worst, ...s) - Math.min(g.worst, ...s)]; }), lineStyle: { opacity: 0 }, showSymbol: false, stack: "band", stackStrategy: "all", silent: true, areaStyle: { color: colours.accent, opacity: 0.1 } },
        { type: "scatter", name: "candidates", progressive: 0, large: isLarge, largeThreshold: 2000, data: this.points.map((c) => [c.generation ?? last, c.score]), symbolSize: isLarge ? 3 : 7, itemStyle: { color: colours.muted, opacity: isLarge ? 0.6 : 0.45 }, z: 3 },
        line("mean", "mean", colours.muted, 1.75),
        { ...line("best", "best", colours.accent, 2.75), data: soFar.map((g) => [g.generation, g.best]) },
      ],
    };
  }

  fitnessTip(item) {
    if (item.seriesName === "candidates") return candidateTip(this.points[item.dataIndex], this.report.weights);
    const g = this.generations.find((one) => one.generation === item.value[0]);
    if (!g) return "";
    const pairs = [["best", number(g.best)], ["mean", number(g.mean)], ["worst", number(g.worst)], ["candidates", count(g.num_candidates)], ["tokens", count(g.num_tokens)], ["time", `${number(g.seconds, 1)} s`]];
    if (g.stage) pairs.unshift(["stage", g.stage]);
    if (g.num_dropped) pairs.push(["dropped", count(g.num_dropped)]);
    if (g.num_failed) pairs.push(["failed", count(g.num_failed)]);
    return tip(`Generation ${g.generation}`, pairs);
  }

  finalsOption(colours) {
    const base = frame(colours);
    const data = this.finalists.map((c) => ({ value: [c.score, this.facts.select[c.version]], itemStyle: { color: c.id === this.facts.winner ? colours.accent : colours.muted }, symbolSize: c.id === this.facts.winner ? 14 : 10, label: { show: true, formatter: () => c.id, position: "right", fontSize: 11, color: colours.muted } }));
    return {
      ...base,
      grid: { left: 52, right: 110, top: 30, bottom: 44 },
      tooltip: { ...base.tooltip, formatter: ({ dataIndex }) => { const c = this.finalists[dataIndex]; return tip(c.id, [["search", number(c.score)], ["select", number(this.facts.select[c.version])]]); } },
      xAxis: flat(colours, "Search score", { scale: true, min: null, max: null }),
      yAxis: upright(colours, "Select score"),
      series: [{ type: "scatter", data, labelLayout: { hideOverlap: true } }],
    };
  }

  async loadDuel() {
    const wanted = this.picked || this.best;
    this.duelBox.replaceChildren(emptyNote("Reading the answers …"));
    try {
      const duel = await this.source.get(`${this.path}/duel`, { candidate: this.picked });
      if (wanted === (this.picked || this.best)) this.drawDuel(duel);
    } catch (error) {
      this.duelBox.replaceChildren(errorNote(error));
    }
  }

  drawDuel({ founder, candidate, tasks }) {
    if (!tasks.length) {
      this.duelBox.replaceChildren(emptyNote(candidate ? `${candidate} and ${founder} have no task in common.` : "There is no candidate to compare with a founder yet."));
      return;
    }
    const sources = new Map();
    for (const [task, before, , after] of tasks) {
      const name = task.split("/")[0];
      const row = sources.get(name) ?? { won: 0, lost: 0, same: 0 };
      row[after > before ? "won" : after < before ? "lost" : "same"] += 1;
      sources.set(name, row);
    }
    const total = (key) => [...sources.values()].reduce((sum, row) => sum + row[key], 0);
    const bar = (row) => {
      const all = row.won + row.lost + row.same;
      const parts = ["won", "same", "lost"].map((key) => { const part = h("span", { class: `duel-${key}` }); part.style.width = `${(100 * row[key]) / all}%`; return part; });
      return h("span", { class: "duel-bar", role: "img", "aria-label": `won ${row.won}, same ${row.same}, lost ${row.lost}` }, parts);
    };
    const rows = [...sources].map(([name, row]) => [name, bar(row), row.won, row.same, row.lost]);
    const differing = tasks.filter(([, before, , after]) => before !== after).sort((a, b) => a[3] - a[1] - (b[3] - b[1]));
    this.duelBox.replaceChildren(
      h("p", { class: "lead" }, `${candidate} against ${founder}, on ${count(tasks.length, "task")} that both answered: ${count(total("won"))} won, ${count(total("lost"))} lost, ${count(total("same"))} the same.`),
      table(["Tasks", "", ["Won"], ["Same"], ["Lost"]], rows, "duel"),
      differing.length ? folded(`The ${count(differing.length, "task")} that differ`, () => new DuelList(this.source, this.path, differing, founder, candidate).element) : "");
  }

  close() {
    [this.fitness, this.finals, this.tokens, this.lineage.chart, ...this.bars].forEach((chart) => chart.close());
    this.dropped.close();
  }
}

function tasksWords({ num_report: rows, num_questions: questions }) {
  return questions === 0 || questions === rows ? count(rows, "task") : `${count(questions, "question")} (${count(rows, "row")})`;
}

// Tasks with different rewards for two candidates; a click shows both answers.
class DuelList {
  constructor(source, path, tasks, founder, candidate) {
    Object.assign(this, { source, path, tasks });
    const columns = [{ name: "task", label: "Task", class: "run" }, { name: "before", label: founder, class: "figure" }, { name: "after", label: candidate, class: "figure" }];
    this.table = new LongTable({ columns, kind: "tasks", label: "Tasks that differ", row: (i) => this.cells(i) });
    this.detail = h("div", { class: "detail", "aria-live": "polite" }, emptyNote("Choose a task to read both answers."));
    this.names = [founder, candidate];
    this.element = h("div", { class: "split" }, this.table.element, this.detail);
    this.table.resize(tasks.length);
  }

  cells(index) {
    const [task, before, , after] = this.tasks[index];
    return { key: task, onclick: () => this.open(index), class: after > before ? "won" : "lost", cells: [el("button", PLAIN, task), number(before, 2), number(after, 2)] };
  }

  async open(index) {
    const [task, , first, , second] = this.tasks[index];
    try {
      const events = await Promise.all([first, second].map((seq) => this.source.get(`${this.path}/event/${seq}`)));
      const answer = (event, k) => [h("h4", null, this.names[k], h("span", { class: "note" }, ` reward ${number(event.payload.reward, 2)}`)), longText("answer", event.payload.completion?.text ?? "")];
      this.detail.replaceChildren(h("h3", null, task), ...events.flatMap(answer));
    } catch (error) {
      this.detail.replaceChildren(errorNote(error));
    }
  }
}

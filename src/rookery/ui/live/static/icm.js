// A labelling: coherence by chain, and each label with the decision behind it.

import { barChart, lineChart } from "./charts.js";
import { choice, el, emptyNote, errorNote, facts, figure, folded, h, lead, note, place, section, table } from "./dom.js";
import { costsLine } from "./report.js";
import { listed, Metrics } from "./source.js";
import { LongTable, PLAIN } from "./table.js";
import { count, isNumber, number, score } from "./words.js";

const LABEL_COLUMNS = [
  { name: "id", label: "Item", class: "run" },
  { name: "label", label: "Label", class: "kind" },
  { name: "margin", label: "Log-odds", class: "figure" },
  { name: "text", label: "Text", class: "payload" },
];
const BIN_WIDTHS = [0.1, 0.2, 0.5, 1, 2, 5];
const MARGIN_BINS = 24;

// Histogram of items by the log-odds of their label, in round bins, stacked by label.
function marginBars(rows) {
  const known = rows.filter((row) => isNumber(row.margin));
  const margins = known.map((row) => row.margin);
  const [low, high] = [Math.min(0, ...margins), Math.max(1, ...margins)];
  const width = BIN_WIDTHS.find((each) => (high - low) / each < MARGIN_BINS - 1) ?? 10;
  const first = Math.floor(low / width);
  const num = Math.floor(high / width) - first + 1;
  const labels = [...new Set(known.map((row) => row.label))].sort();
  const inBin = (label, k) => known.filter((row) => row.label === label && Math.floor(row.margin / width) - first === k).length;
  const places = Array.from({ length: num }, (_, k) => k);
  return { names: places.map((k) => number((first + k) * width, 1)), series: labels.map((label) => ({ name: label, values: places.map((k) => inBin(label, k)) })) };
}

export class IcmView {
  constructor({ source, path, view, report }) {
    Object.assign(this, { source, path, labels: [], metrics: new Metrics(source, path, 500) });
    const made = (label, height) => lineChart({ label, series: [], x: "Iteration", height });
    this.utility = made("Utility over the iterations of each chain", 320);
    this.frustrated = made("Frustrated items over the iterations of each chain", 240);
    this.labelled = made("Labelled items over the iterations of each chain", 240);
    this.temperature = made("Temperature over the iterations", 240);
    this.inconsistent = made("Inconsistent pairs over the iterations of each chain", 240);
    this.inconsistentBox = figure(["Inconsistent pairs", h("span", { class: "note" })], this.inconsistent);
    this.margins = barChart({ label: "Items by the log-odds of their label", height: 280, x: "Log-odds of the label", y: "Items", bars: () => marginBars(this.labels) });
    this.prefill = barChart({ label: "Prompt tokens of a plain loop and of this search", height: 180, x: "Prompt tokens", isLying: true, bars: () => ({ names: ["a plain loop", "each context once", "with shared prefixes"], series: [{ name: "tokens", values: [this.report.tokens.naive, this.report.tokens.requested, this.report.tokens.computed] }], mark: 2 }) });
    [this.results, this.state, this.chainBox, this.labelBox, this.costs] = Array.from({ length: 5 }, () => h("div"));
    this.order = choice("Order", [["weak", "the least sure first"], ["strong", "the surest first"], ["id", "by item"]], "weak", () => this.arrange());
    this.table = new LongTable({ columns: LABEL_COLUMNS, kind: "labels", label: "Labels", row: (i) => this.cells(i) });
    this.detail = h("div", { class: "detail", "aria-live": "polite" }, emptyNote("Choose an item to see what decided its label."));
    this.picked = place().query.get("item") ?? "";
    this.labelLead = lead("");
    this.labelCount = h("span", { class: "note" });
    this.labelParts = [this.labelLead, this.margins.box, h("div", { class: "bar" }, this.order, this.labelCount), h("div", { class: "split" }, this.table.element, this.detail)];
    this.element = h("div", null,
      this.results,
      section("The search", lead("One line for each chain. A frustrated item is predicted by the others to have another label than it has."), this.state, figure("U, the coherence of all labels", this.utility), h("div", { class: "panels" }, figure("Frustrated", this.frustrated), figure("Labelled", this.labelled), figure("Temperature", this.temperature), this.inconsistentBox), this.chainBox),
      section("The labels", this.labelBox),
      section("Prompt tokens", this.costs));
    this.update(view, report);
  }

  async update(view, report) {
    this.report = report;
    this.decisions = listed(view, "decisions");
    this.chains = new Map();
    for (const d of this.decisions) {
      if (!this.chains.has(d.chain)) this.chains.set(d.chain, []);
      this.chains.get(d.chain).push(d);
    }
    const known = new Set(report.chains.map((c) => `${c.batch}/${c.chain}`)); // chains missing from the report are baselines
    const isOne = [...this.chains.keys()].every((chain) => chain.startsWith("0/"));
    const name = (chain) => (known.size && !known.has(chain) ? "inverted seed" : isOne ? `chain ${chain.slice(2)}` : `batch ${chain.replace("/", ", chain ")}`);
    const inOrder = [...this.chains].sort(([a], [b]) => a.localeCompare(b, undefined, { numeric: true }));
    const series = (key) => inOrder.map(([chain, rows]) => ({ name: name(chain), points: rows.map((d) => [d.iteration, d[key]]) }));
    for (const key of ["utility", "frustrated", "labelled", "temperature"]) this[key].setSeries(series({ frustrated: "num_frustrated", labelled: "num_labelled" }[key] ?? key));
    const accepted = this.decisions.filter((d) => d.is_accepted).length;
    this.state.replaceChildren(lead(this.decisions.length ? `${count(this.decisions.length, "decision")}, ${count(accepted)} accepted, in ${count(this.chains.size, "chain")}.` : "No decision is made yet."));
    this.drawReport();
    this.drawChains();
    try {
      this.drawInconsistent(await this.metrics.update(), name);
      this.labels = (await this.source.get(`${this.path}/labels`)).labels;
    } catch (error) {
      this.labelBox.replaceChildren(errorNote(error));
      return;
    }
    this.drawLabels();
  }

  // Draws pairs of labels that break a constraint, from the metrics; hidden without any.
  drawInconsistent(curves, name) {
    const prefix = "icm/num_violated_";
    const violations = [...curves].filter(([metric]) => metric.startsWith(prefix));
    this.inconsistentBox.hidden = !violations.length;
    const most = Math.max(0, ...violations.flatMap(([, points]) => points.map(([, y]) => y ?? 0)));
    this.inconsistentBox.querySelector(".note").textContent = most ? `${count(most)} at most` : "none in any decision";
    this.inconsistent.box.hidden = !most;
    this.inconsistent.setSeries(violations.map(([metric, points]) => ({ name: name(metric.slice(prefix.length).replace("_", "/")), points })));
  }

  drawReport() {
    const { rows, labels, tokens, summary } = this.report;
    const isTrueKnown = rows.some((row) => isNumber(row.accuracy));
    const line = (row) => ({
      class: row.is_winner ? "winner" : null,
      cells: [[h("span", { class: "name" }, row.name), row.note && [" ", h("span", { class: "note" }, row.note)]], count(row.num_labelled), Object.values(row.balance).join(" / ") || "–", h("span", { class: row.num_violated ? "broken" : null }, count(row.num_violated)), score(row.utility), score(row.agreement), [h("b", null, score(row.accuracy)), isNumber(row.low) && h("span", { class: "interval" }, `${score(row.low)} to ${score(row.high)}`)]],
    });
    this.results.replaceChildren(section("The labels beside the baselines", rows.length
      ? [lead(`Utility is comparable within this run only, and among labels that break no constraint.${isTrueKnown ? " True labels were read after the search, for this table." : ""}`), table(["Method", ["Labelled"], [labels.join(" / ")], ["Broken"], ["Utility"], ["Same as icm"], ["True"]], rows.map(line))]
      : emptyNote("Nothing is compared yet.")));
    const saved = tokens.computed ? (tokens.naive / tokens.computed).toFixed(1) : "";
    this.costs.replaceChildren(...(saved ? [lead(`What the search computed, in blocks of 16 tokens as prefix caches keep them: ${saved} times less than a plain loop over the same contexts.`), this.prefill.box, costsLine(summary.costs)] : [emptyNote("Nothing is computed yet.")]));
    this.prefill.redraw();
  }

  // Tabulates the chains: from the report, or their current state.
  drawChains() {
    const live = [...this.chains].map(([chain, rows]) => {
      const [batch, name] = chain.split("/");
      const last = rows.reduce((a, b) => (a.iteration > b.iteration ? a : b));
      return { batch, chain: name, num_iterations: last.iteration + 1, num_accepted: rows.filter((d) => d.is_accepted).length, num_labelled: last.num_labelled, num_frustrated: last.num_frustrated, utility: last.utility };
    });
    const rows = this.report.chains.length ? this.report.chains : live;
    const ended = (c) => (c.is_settled === undefined ? "searching" : c.is_settled ? "nothing frustrated" : "iterations used up");
    const line = (c) => ({ class: c.is_best ? "winner" : null, cells: [String(c.batch), String(c.chain), count(c.num_iterations), count(c.num_accepted), count(c.num_labelled), count(c.num_frustrated), score(c.utility), ended(c)] });
    this.chainBox.replaceChildren(rows.length ? table([["Batch"], ["Chain"], ["Iterations"], ["Accepted"], ["Labelled"], ["Frustrated"], ["Utility"], "Ended"], rows.map(line)) : emptyNote("No chain is finished yet."));
  }

  drawLabels() {
    if (!this.labels.length) {
      this.labelBox.replaceChildren(emptyNote("Labels with their margins come when the search is over."));
      return;
    }
    this.inOrder = [...this.labels];
    const balance = Object.entries(this.report.balance).map(([name, held]) => `${name} ${count(held)}`).join(", ");
    this.labelLead.textContent = `How sure each label is, by its log-odds given all others.${balance ? ` ${balance}.` : ""}`;
    this.labelCount.textContent = count(this.labels.length, "label");
    if (this.labelLead.parentNode !== this.labelBox) this.labelBox.replaceChildren(...this.labelParts); // what is moved scrolls to its top
    this.margins.redraw();
    this.arrange();
    if (this.picked) this.open(this.picked);
  }

  arrange() {
    const margin = (row) => (isNumber(row.margin) ? row.margin : -Infinity);
    const orders = { weak: (a, b) => margin(a) - margin(b), strong: (a, b) => margin(b) - margin(a), id: (a, b) => String(a.id).localeCompare(String(b.id), undefined, { numeric: true }) };
    this.labels.sort(orders[this.order.value]);
    this.table.resize(this.labels.length);
  }

  cells(index) {
    const row = this.labels[index];
    return row && { key: row.id, class: row.id === this.picked ? "chosen" : "", onclick: () => { note({ item: row.id }); this.open(row.id); }, cells: [el("button", PLAIN, String(row.id)), row.label ?? "–", number(row.margin), row.text] };
  }

  // Shows the decision that gave an item its label, and the other labels at that time.
  async open(id) {
    this.picked = id;
    this.table.refresh();
    const row = this.labels.find((one) => one.id === id);
    if (!row) return;
    const chain = `${row.batch}/${row.chain}`;
    const at = this.inOrder.filter((one) => one.batch === row.batch).indexOf(row);
    const taken = (this.chains.get(chain) ?? []).filter((d) => d.is_accepted && (d.item === id || d.changed.includes(at)));
    const last = taken.reduce((a, b) => (a && a.iteration > b.iteration ? a : b), null);
    const pairs = [["label", row.label ?? "none"], ["log-odds given all others", number(row.margin)], ["batch and chain", chain.replace("/", ", ")]];
    const head = [h("h3", null, String(id)), h("pre", { class: "answer prompt" }, row.text ?? "")];
    if (!last) {
      this.detail.replaceChildren(...head, facts(pairs), emptyNote("No decision changed it: it began with this label."));
      return;
    }
    try {
      const { payload } = await this.source.get(`${this.path}/event/${last.seq}`);
      if (this.picked !== id) return;
      pairs.push(["decided in iteration", count(last.iteration)], ...(last.item === id ? [] : [["with", last.item]]), ["temperature", number(payload.temperature)], ["U then", score(payload.utility)]);
      this.detail.replaceChildren(...head, facts(pairs), this.context(row, payload.labels));
    } catch (error) {
      this.detail.replaceChildren(errorNote(error));
    }
  }

  context(row, held) {
    const items = this.inOrder.filter((one) => one.batch === row.batch);
    const named = this.report.labels;
    if (items.length !== held.length) return emptyNote("Which items stood beside it is not known.");
    const others = items.map((one, k) => ({ one, label: held[k] === "-" ? null : named[held.charCodeAt(k) - 48] })).filter(({ one, label }) => one.id !== row.id && label);
    const details = folded(`The context that decided it: ${count(others.length, "labelled item")}`, () => table(["Item", "Label then", "Text"], others.slice(0, 300).map(({ one, label }) => [String(one.id), label, (one.text ?? "").slice(0, 200)])));
    details.open = others.length < 30;
    return details;
  }

  close() {
    [this.utility, this.frustrated, this.labelled, this.temperature, this.inconsistent, this.margins, this.prefill].forEach((chart) => chart.close());
    this.table.close();
  }
}

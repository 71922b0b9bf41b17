// A labelling: how coherent it became, chain by chain, and every label with its margin.

import { lineChart } from "./charts.js";
import { emptyNote, h } from "./dom.js";
import { listed } from "./source.js";
import { LongTable } from "./table.js";
import { count, isNumber, number } from "./words.js";

const LABEL_COLUMNS = [
  { name: "id", label: "Item", class: "run" },
  { name: "label", label: "Label", class: "kind" },
  { name: "margin", label: "Margin", class: "figure" },
  { name: "text", label: "Text", class: "payload" },
];

export class IcmView {
  constructor({ source, path, view, report }) {
    Object.assign(this, { source, path, labels: [] });
    const made = (label) => lineChart({ label, series: [], x: "Iteration", height: 280 });
    this.utility = made("U of each chain by iteration");
    this.frustrated = made("Items whose label the others contradict, by iteration");
    this.labelled = made("Labelled items by iteration");
    this.state = h("p", { class: "lead" });
    this.warnings = h("div");
    this.order = h("select", { "aria-label": "Order", onchange: () => this.arrange() }, [["weak", "weakest margin first"], ["strong", "strongest margin first"], ["id", "by item"]].map(([v, t]) => h("option", { value: v }, t)));
    this.table = new LongTable({ columns: LABEL_COLUMNS, kind: "labels", label: "Labels", row: (i) => this.cells(i) });
    this.labelBox = h("div", null, emptyNote("Labels with their margins come when the search is over."));
    const figure = (title, chart) => h("figure", null, h("figcaption", null, title), chart.box);
    this.element = h("div", null,
      this.warnings,
      h("section", null, h("h2", null, "The search"), this.state, figure("U, the coherence of all labels", this.utility), h("div", { class: "panels" }, figure("Contradicted by the others", this.frustrated), figure("Labelled", this.labelled))),
      h("section", null, h("h2", null, "Labels"), this.labelBox));
    this.update(view, report);
  }

  async update(view, report) {
    const decisions = listed(view, "decisions");
    const chains = new Map();
    for (const d of decisions) chains.set(d.chain, [...(chains.get(d.chain) ?? []), d]);
    const series = (key) => [...chains].map(([chain, rows]) => ({ name: `batch ${chain.replace("/", ", chain ")}`, points: rows.map((d) => [d.iteration, d[key]]) }));
    this.utility.setSeries(series("utility"));
    this.frustrated.setSeries(series("num_frustrated"));
    this.labelled.setSeries(series("num_labelled"));
    const accepted = decisions.filter((d) => d.is_accepted).length;
    this.state.textContent = decisions.length ? `${count(decisions.length, "decision")}, ${count(accepted)} accepted, in ${count(chains.size, "chain")}.` : "No decision is made yet.";
    const told = report.warnings ?? [];
    this.warnings.replaceChildren(...(told.length ? [h("aside", { class: "warnings" }, h("h2", null, "Worth knowing"), h("ul", null, told.map((w) => h("li", null, w))))] : []));
    const found = await this.source.get(`${this.path}/labels`);
    this.labels = found.labels;
    if (this.labels.length) {
      this.labelBox.replaceChildren(h("div", { class: "bar" }, this.order, h("span", { class: "note" }, count(this.labels.length, "label"))), this.table.element);
      this.arrange();
    }
  }

  arrange() {
    const margin = (row) => (isNumber(row.margin) ? row.margin : -Infinity);
    const orders = { weak: (a, b) => margin(a) - margin(b), strong: (a, b) => margin(b) - margin(a), id: (a, b) => String(a.id).localeCompare(String(b.id), undefined, { numeric: true }) };
    this.labels.sort(orders[this.order.value]);
    this.table.resize(this.labels.length);
  }

  cells(index) {
    const row = this.labels[index];
    return row && { cells: [row.id, row.label, number(row.margin), row.text] };
  }

  close() {
    [this.utility, this.frustrated, this.labelled].forEach((chart) => chart.close());
    this.table.close();
  }
}

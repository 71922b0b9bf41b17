// The list of runs: filter, sort, search, select; the address holds the state.

import { sparkPoints } from "./charts.js";
import { address, brandLine, drawn, el, emptyNote, errorNote, h, note, place, placed, refill, runLink, svgEl } from "./dom.js";
import { LongTable } from "./table.js";
import { ago, clock, count, duration, interval, isNumber, number, progressWords } from "./words.js";

const COLUMNS = [
  { name: "pick", label: "", class: "pick" },
  { name: "name", label: "Run", class: "run", sort: (r) => r.name.toLowerCase() },
  { name: "kind", label: "Loop", class: "kind", sort: (r) => r.kind },
  { name: "status", label: "Status", class: "status", sort: (r) => r.status },
  { name: "result", label: "Result", class: "result", sort: (r) => r.result?.mean ?? -Infinity },
  { name: "trend", label: "Trend", class: "trend" },
  { name: "started", label: "Started", class: "when", sort: (r) => r.started_s },
  { name: "took", label: "Took", class: "took", sort: (r) => r.worked_s },
];
const ORDERS = COLUMNS.filter((column) => column.sort).flatMap(({ name }) => [`-${name}`, name]);
const STATUSES = ["", "running", "done", "failed", "stopped", "killed", "unreadable"];

export function statusMark(row) {
  return el("span", { class: "mark", "data-status": row.status, title: row.reason || null }, row.status);
}

export function progressBar(progress, isRunning) {
  if (!progress) return null;
  const bar = el("progress", { max: progress.total, value: progress.done, "aria-label": progressWords(progress) });
  const left = isRunning && isNumber(progress.left_s) ? `${duration(progress.left_s)} left, ` : "";
  return el("span", { class: "progress" }, bar, el("span", { class: "note" }, left + progressWords(progress)));
}

function sparkline(values) {
  if (values.length < 2) return el("span", { class: "note" }, values.length ? number(values[0]) : "");
  const line = svgEl("polyline", { points: sparkPoints(values, 96, 28), class: "spark-line" });
  return svgEl("svg", { class: "spark", viewBox: "0 0 96 28", width: 96, height: 28, "aria-hidden": "true" }, line);
}

function resultCell(row) {
  const result = row.result;
  if (!result) return "";
  return [
    isNumber(result.mean) && el("span", { class: "value" }, el("b", null, number(result.mean)), el("span", { class: "interval" }, interval(result.low, result.high))),
    el("span", { class: "note" }, result.label),
  ];
}

class RunsView {
  constructor(source, main) {
    this.source = source;
    this.rows = new Map();
    this.version = this.told = 0;
    this.chosen = [];
    const { query } = place();
    this.state = { q: query.get("q") ?? "", loop: query.get("loop") ?? "", status: placed("status", STATUSES), sort: placed("sort", ["-started", ...ORDERS]), sel: query.getAll("sel") };
    this.selected = new Set(this.state.sel);
    this.build(main);
  }

  build(main) {
    const change = (name) => (event) => this.set({ [name]: event.target.value });
    this.search = h("input", { type: "search", placeholder: "Search name, model, reason", "aria-label": "Search", value: this.state.q, oninput: change("q") });
    this.loop = h("select", { "aria-label": "Loop", onchange: change("loop") });
    this.status = h("select", { "aria-label": "Status", onchange: change("status") }, STATUSES.map((s) => h("option", { value: s, selected: s === this.state.status }, s || "any status")));
    this.lead = h("p", { class: "lead" });
    this.compare = h("span", { class: "compare-bar" });
    this.trouble = h("div");
    this.box = h("div");
    main.replaceChildren(
      h("header", { class: "masthead" }, brandLine("runs"), h("h1", null, "Runs"), this.lead),
      h("div", { class: "bar" }, this.search, this.loop, this.status, this.compare),
      this.trouble,
      this.box,
    );
    document.title = "Runs · Rookery";
  }

  async start() {
    await this.load();
    await drawn();
    const isBehind = ({ version, pending }) => (this.told = version) !== this.version || pending || this.trouble.hasChildNodes();
    this.stop = this.source.follow("stream", (told) => isBehind(told) && this.load(), () => this.load());
    this.clock = setInterval(() => this.table?.refresh(), 30000);
  }

  async load() {
    if (this.loading) return;
    this.loading = true;
    try {
      const fresh = await this.source.get("runs", { since: this.version });
      this.version = fresh.version;
      this.folder = fresh.folder;
      this.pending = fresh.pending;
      if (fresh.is_whole) this.rows.clear(); // drops rows of an earlier server too
      for (const row of fresh.runs) this.rows.set(row.id, row);
      for (const id of fresh.removed) this.rows.delete(id);
      this.trouble.replaceChildren();
      if (fresh.is_whole || fresh.runs.length || fresh.removed.length || !this.table) this.arrange();
      this.describe();
    } catch (error) {
      this.pending = this.told = 0; // the stream triggers a new request
      this.trouble.replaceChildren(errorNote(error));
    } finally {
      this.loading = false;
    }
    if (this.pending || this.told > this.version) drawn().then(() => this.isClosed || this.load());
  }

  set(values) {
    Object.assign(this.state, values);
    note({ ...this.state, sort: this.state.sort === "-started" ? "" : this.state.sort });
    if ("sort" in values) {
      this.table.mark(values.sort);
      this.table.body.scrollTop = 0;
    }
    this.arrange();
    this.describe();
  }

  // Chooses and sorts the rows by the state.
  arrange() {
    const { q, loop, status, sort } = this.state;
    const words = q.toLowerCase().split(/\s+/).filter(Boolean);
    const fits = (row) => {
      const all = `${row.name} ${row.id} ${row.model} ${row.kind} ${row.reason}`.toLowerCase();
      return (!loop || row.kind === loop) && (!status || row.status === status) && words.every((w) => all.includes(w));
    };
    const column = COLUMNS.find((c) => c.name === sort.replace(/^-/, ""));
    const way = sort.startsWith("-") ? -1 : 1;
    const order = (a, b) => (a === b ? 0 : a < b ? -way : way);
    this.chosen = [...this.rows.values()].filter(fits).sort((a, b) => order(column.sort(a), column.sort(b)) || (a.id < b.id ? -1 : 1));
    if (!this.table) this.makeTable();
    this.table.resize(this.chosen.length);
  }

  makeTable() {
    this.table = new LongTable({ columns: COLUMNS, kind: "runs", label: "Runs", row: (i) => this.cells(this.chosen[i]), sorted: this.state.sort, onsort: (sort) => this.set({ sort }) });
    this.nothing = h("div");
    this.box.replaceChildren(this.table.element, this.nothing);
  }

  cells(row) {
    if (!row) return null;
    const pick = el("input", { type: "checkbox", "aria-label": `Select ${row.name}`, checked: this.selected.has(row.id), onchange: (e) => this.pick(row.id, e.target) });
    const isRunning = row.status === "running";
    const reason = (row.reason ?? "").replaceAll(`${this.folder}/${row.id}/`, ""); // drop the folder, so that the cause comes first
    return {
      key: row.id,
      cells: [
        pick,
        [el("a", { class: "name", href: runLink(row.id) }, row.name), el("span", { class: "note model" }, row.model)],
        row.kind,
        [statusMark(row), (!isRunning && reason && el("span", { class: "note reason" }, reason)) || progressBar(row.progress, isRunning)],
        resultCell(row),
        el("span", { title: row.spark_of || null }, sparkline(row.spark)),
        el("span", { title: clock(row.started_s) }, ago(row.started_s)),
        row.started_s ? duration(row.worked_s) : "",
      ],
    };
  }

  pick(id, box) {
    if (box.checked) this.selected.add(id);
    else this.selected.delete(id);
    this.set({ sel: [...this.selected] });
  }

  describe() {
    const kinds = [...new Set([this.state.loop, ...[...this.rows.values()].map((r) => r.kind)].filter(Boolean))].sort();
    if (this.kinds !== kinds.join()) {
      this.kinds = kinds.join();
      this.loop.replaceChildren(...["", ...kinds].map((k) => h("option", { value: k, selected: k === this.state.loop }, k || "any loop")));
    }
    const running = [...this.rows.values()].filter((r) => r.status === "running").length;
    const parts = [`${count(this.rows.size, "run")} in ${this.folder}`];
    if (running) parts.push(`${running} running`);
    if (this.pending) parts.push(`reading ${count(this.pending)} more`);
    this.lead.textContent = parts.join(" · ");
    refill(this.nothing, this.chosen.length ? null : this.emptiness());
    const ids = [...this.selected].filter((id) => this.rows.has(id));
    refill(this.compare,
      ids.length >= 2
        ? h("a", { class: "button", href: address(["compare"], { runs: ids }) }, `Compare ${ids.length} runs`)
        : h("span", { class: "note" }, ids.length ? "Select one more to compare." : "Select two or more to compare."),
    );
  }

  emptiness() {
    if (this.pending) return emptyNote("Reading the runs …");
    if (this.rows.size) return emptyNote("No run fits. Clear the search or the filters to see them all.");
    return h("div", { class: "empty" }, h("p", null, `There are no runs in ${this.folder} yet.`), h("p", null, "Start one, and it appears here: ", h("code", null, "rookery demo")));
  }

  close() {
    this.isClosed = true;
    clearInterval(this.clock);
    this.stop?.();
    this.table?.close();
  }
}

export async function showRuns(source, main) {
  const view = new RunsView(source, main);
  await view.start();
  return view;
}

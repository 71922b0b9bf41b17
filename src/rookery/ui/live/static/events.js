// The events of a run: a list filtered by kind and text, and one event in full.

import { el, emptyNote, errorNote, h, later, note, place } from "./dom.js";
import { LongTable, PLAIN } from "./table.js";
import { clip, count, timeOfDay } from "./words.js";

const PAGE = 200;
const LONGEST = 200000; // characters of one text: browsers hang on longer ones
const COLUMNS_OF_EVENTS = [
  { name: "seq", label: "#", class: "figure seq" },
  { name: "time", label: "Time", class: "time" },
  { name: "kind", label: "Kind", class: "kind" },
  { name: "key", label: "Key", class: "key" },
  { name: "payload", label: "Payload", class: "payload" },
];

// JSON as a tree that unfolds; texts keep their line breaks.
export function jsonTree(value, name, isOpen = true) {
  const label = name === undefined ? "" : `${name}: `;
  if (value === null || typeof value !== "object") {
    const isText = typeof value === "string";
    return h("div", { class: "json-leaf" }, h("span", { class: "json-name" }, label), h("span", { class: isText ? "json-text" : "json-number" }, clip(String(value), LONGEST)));
  }
  const entries = Array.isArray(value) ? value.map((v, k) => [k, v]) : Object.entries(value);
  const size = Array.isArray(value) ? `[${count(entries.length)}]` : `{${count(entries.length)}}`;
  const details = h("details", { class: "json" }, h("summary", null, label, h("span", { class: "note" }, size)));
  const fillIn = () => {
    if (details.open && details.childElementCount === 1) {
      details.append(h("div", { class: "json-body" }, entries.slice(0, 500).map(([k, v]) => jsonTree(v, k, entries.length < 30))));
      if (entries.length > 500) details.append(h("p", { class: "note" }, `and ${count(entries.length - 500)} more`));
    }
  };
  details.addEventListener("toggle", fillIn);
  if (isOpen) details.open = true;
  return details;
}

export class EventsView {
  constructor(source, id, counts) {
    this.source = source;
    this.path = `runs/${encodeURIComponent(id)}`;
    const { query } = place();
    this.state = { kind: query.get("kind") ?? "", text: query.get("text") ?? "", seq: Number(query.get("seq")) || 0 };
    this.pages = new Map();
    this.table = new LongTable({ columns: COLUMNS_OF_EVENTS, kind: "events", label: "Events", row: (i) => this.cells(i) });
    this.kind = h("select", { "aria-label": "Kind", onchange: (e) => this.set({ kind: e.target.value }) });
    const typed = later((value) => this.isClosed || this.set({ text: value }), 250);
    this.text = h("input", { type: "search", placeholder: "Text in key or payload", "aria-label": "Text", value: this.state.text, oninput: (e) => typed(e.target.value) });
    this.status = h("span", { class: "note" });
    this.detail = h("div", { class: "detail", "aria-live": "polite" });
    this.element = h("section", { "aria-label": "Events" }, h("div", { class: "bar" }, this.kind, this.text, this.status), h("div", { class: "split" }, this.table.element, this.detail));
    this.setCounts(counts);
    this.load(0).then(() => this.state.seq && this.open(this.state.seq));
    if (!this.state.seq) this.detail.append(emptyNote("Choose an event to read it whole."));
  }

  setCounts(counts) {
    const { kind } = this.state; // of a link there may be none
    const kinds = Object.entries({ ...(kind && { [kind]: 0 }), ...counts }).sort((a, b) => b[1] - a[1]);
    const options = [["", Object.values(counts).reduce((a, b) => a + b, 0)], ...kinds];
    this.kind.replaceChildren(...options.map(([k, n]) => h("option", { value: k, selected: k === kind }, `${k || "all kinds"} (${count(n)})`)));
  }

  set(values) {
    Object.assign(this.state, values);
    note({ kind: this.state.kind, text: this.state.text });
    this.pages.clear();
    this.table.body.scrollTop = 0;
    this.load(0);
  }

  async load(page) {
    if (this.pages.has(page)) return;
    this.pages.set(page, null);
    const { kind, text } = this.state;
    try {
      const answer = await this.source.get(`${this.path}/events`, { kind, text, offset: page * PAGE, limit: PAGE });
      if (kind !== this.state.kind || text !== this.state.text) return;
      this.pages.set(page, answer.rows);
      this.status.textContent = count(answer.total, "event");
      this.table.resize(answer.total);
    } catch (error) {
      this.pages.delete(page);
      this.status.textContent = error.message;
    }
  }

  // New events: keep the loaded pages and reload the last one.
  grow(counts) {
    this.setCounts(counts);
    const last = Math.floor(this.table.size / PAGE);
    this.pages.delete(last);
    this.load(last);
  }

  cells(index) {
    const page = Math.floor(index / PAGE);
    const row = this.pages.get(page)?.[index % PAGE];
    if (!row) {
      this.load(page);
      return null;
    }
    const [seq, kind, key, payload, time] = row;
    return {
      key: seq,
      class: seq === this.state.seq ? "chosen" : "",
      onclick: () => { note({ seq }); this.open(seq); },
      cells: [el("button", PLAIN, count(seq)), timeOfDay(time), kind, key, payload],
    };
  }

  async open(seq) {
    if (this.opening === seq) return;
    this.opening = seq;
    this.state.seq = seq;
    this.table.refresh();
    try {
      const event = await this.source.get(`${this.path}/event/${seq}`);
      if (this.opening === seq) this.detail.replaceChildren(h("h3", null, `${event.kind} ${event.key}`), jsonTree(event.payload));
    } catch (error) {
      if (this.opening === seq) this.detail.replaceChildren(errorNote(error));
    }
    if (this.opening === seq) this.opening = 0;
  }

  close() {
    this.isClosed = true;
    this.table.close();
  }
}

// A table of any length: only visible rows have nodes.

import { el, h, later, patch, perFrame } from "./dom.js";

const SPARE = 6; // extra rows beyond either edge
export const PLAIN = { class: "plain" }; // a button that looks like text; its row handles the click
const REST_MS = 150; // pause without scrolling before nodes are reordered

// A reusable node: making a new one for each row costs several times more.
class Row {
  constructor(columns) {
    this.cells = columns.map((column) => h("div", { class: `lt-cell ${column.class ?? ""}`, role: "cell" }));
    this.node = h("div", { role: "row", onclick: () => this.onclick?.() }, this.cells);
  }

  show(index, row, top) {
    this.key = row?.key;
    this.onclick = row?.onclick;
    const kind = `lt-row ${row?.class ?? ""} ${row ? "" : "waiting"}`;
    if (this.kind !== kind) this.node.className = this.kind = kind;
    if (this.top !== top) this.node.style.top = `${top}px`;
    if (this.index !== index) this.node.setAttribute("aria-rowindex", index + 1);
    this.index = index;
    this.top = top;
    this.cells.forEach((cell, k) => patch(cell, row?.cells[k]));
  }

  get isHeld() {
    return this.node.matches(":focus-within, :active");
  }
}

// columns: [{ name, label, class, sort }]; row(index) returns a row as
// { key, cells: [text or `el`, ...], class, onclick }, or null if it is not loaded yet. A row keeps
// its node while its key stays visible; other nodes are reused, unless they have the focus.
export class LongTable {
  constructor({ columns, row, label, onsort, sorted, kind }) {
    this.row = row;
    this.size = 0;
    this.shown = new Map();
    this.columns = columns;
    this.draw = perFrame(() => this.paint());
    this.settle = later(() => this.order(), REST_MS);
    this.onsort = onsort;
    this.head = h("div", { class: "lt-row lt-head", role: "row" });
    this.mark(sorted);
    this.spacer = h("div", { class: "lt-space" });
    this.body = h("div", { class: "lt-body", role: "rowgroup", tabindex: "0", onscroll: this.draw }, this.spacer);
    this.element = h("div", { class: `lt ${kind}`, role: "table", "aria-label": label }, this.head, this.body);
    this.observer = new ResizeObserver(() => this.measure());
    this.observer.observe(this.body);
  }

  // The headings, with the order that the rows have now.
  mark(sorted) {
    patch(this.head, this.columns.map((column) => this.heading(column, sorted)));
  }

  heading(column, sorted) {
    const order = sorted === column.name ? "ascending" : sorted === `-${column.name}` ? "descending" : null;
    const mark = order === "ascending" ? " ↑" : order === "descending" ? " ↓" : "";
    const inner = column.sort && this.onsort
      ? el("button", { class: "plain", onclick: () => this.onsort(order === "descending" ? column.name : `-${column.name}`) }, column.label + mark)
      : column.label;
    return el("div", { class: `lt-cell ${column.class ?? ""}`, role: "columnheader", "aria-sort": order }, inner);
  }

  // Row height in pixels, read from the style once per resize, because reading forces a layout.
  get height() {
    this.known ??= parseFloat(getComputedStyle(this.element).getPropertyValue("--row")) || 44;
    return this.known;
  }

  // Sets the number of rows; rows may have new content.
  resize(size) {
    this.size = size;
    this.element.setAttribute("aria-rowcount", size);
    this.refresh();
  }

  refresh() {
    this.isStale = true;
    this.draw();
  }

  measure() {
    this.known = undefined;
    this.seen = this.body.clientHeight;
    this.refresh();
  }

  // Indices of the visible rows and SPARE more: first, and last plus one.
  range() {
    const first = Math.max(0, Math.floor(this.body.scrollTop / this.height) - SPARE);
    return [first, Math.min(this.size, first + Math.ceil((this.seen || 600) / this.height) + 2 * SPARE)];
  }

  paint() {
    const [first, last] = this.range(); // read before writing, to lay out once
    const { height, isStale } = this;
    this.isStale = false;
    const whole = `${this.size * height}px`;
    if (this.spacer.style.height !== whole) this.spacer.style.height = whole;
    const free = new Map(); // reusable rows by key
    for (const [index, row] of this.shown) {
      if (!isStale && index >= first && index < last) continue;
      this.shown.delete(index);
      free.set(row.key === undefined || free.has(row.key) ? row : row.key, row);
    }
    const fresh = [];
    for (let index = first; index < last; index += 1) if (!this.shown.has(index)) fresh.push([index, this.row(index)]);
    const place = (row, index, values) => {
      row.show(index, values, index * height);
      this.shown.set(index, row);
    };
    const others = fresh.filter(([index, values]) => {
      const known = free.get(values?.key);
      if (known) place(known, index, values);
      return !free.delete(values?.key);
    });
    const spare = [...free.values()].filter((row) => !row.isHeld || row.node.remove());
    for (const [index, values] of others) {
      const row = spare.pop() ?? new Row(this.columns);
      place(row, index, values);
      if (!row.node.isConnected) this.spacer.append(row.node);
    }
    for (const row of spare) row.node.remove();
    if (!fresh.length) return;
    if (this.spacer.contains(document.activeElement)) this.order();
    else this.settle();
  }

  // Sorts the nodes by row, for keyboards and screen readers. A moved node loses focus and selection, so
  // the others are moved around the row that has them.
  order() {
    const nodes = [...this.shown].sort(([a], [b]) => a - b).map(([, row]) => row.node);
    const marked = getSelection();
    const isMarked = (node) => !marked.isCollapsed && marked.containsNode(node, true);
    const isFocused = (node) => node.matches(":focus-within, :active");
    const held = Math.max(0, nodes.findIndex(nodes.some(isFocused) ? isFocused : isMarked));
    for (let k = held + 1; k < nodes.length; k += 1) if (nodes[k - 1].nextSibling !== nodes[k]) nodes[k - 1].after(nodes[k]);
    for (let k = held - 1; k >= 0; k -= 1) if (nodes[k + 1].previousSibling !== nodes[k]) nodes[k + 1].before(nodes[k]);
  }

  scrollTo(index) {
    this.body.scrollTop = Math.max(0, (index - 3) * this.height);
  }

  close() {
    this.observer.disconnect();
  }
}

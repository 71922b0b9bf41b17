// A table of any length: only the rows that are seen exist.

import { h, perFrame } from "./dom.js";

const SPARE = 6; // rows beyond either edge

// columns: [{ name, label, class, sort }]; row(index) gives the cells of a row as
// { cells: [node, ...], class, href, onclick }, or null while it is not there yet.
export class LongTable {
  constructor({ columns, row, label, onsort, sorted, kind }) {
    this.row = row;
    this.size = 0;
    this.shown = new Map();
    this.columns = columns;
    this.draw = perFrame(() => this.paint());
    this.head = h("div", { class: "lt-row lt-head", role: "row" }, columns.map((c) => this.heading(c, onsort, sorted)));
    this.spacer = h("div", { class: "lt-space" });
    this.body = h("div", { class: "lt-body", role: "rowgroup", tabindex: "0", onscroll: this.draw }, this.spacer);
    this.element = h("div", { class: `lt ${kind}`, role: "table", "aria-label": label }, this.head, this.body);
    this.observer = new ResizeObserver(() => this.refresh());
    this.observer.observe(this.body);
  }

  heading(column, onsort, sorted) {
    const order = sorted === column.name ? "ascending" : sorted === `-${column.name}` ? "descending" : null;
    const mark = order === "ascending" ? " ↑" : order === "descending" ? " ↓" : "";
    const inner = column.sort && onsort
      ? h("button", { class: "plain", onclick: () => onsort(order === "descending" ? column.name : `-${column.name}`) }, column.label + mark)
      : column.label;
    return h("div", { class: `lt-cell ${column.class ?? ""}`, role: "columnheader", "aria-sort": order }, inner);
  }

  get height() {
    return parseFloat(getComputedStyle(this.element).getPropertyValue("--row")) || 44;
  }

  // The number of rows changed, or their content did.
  resize(size) {
    this.size = size;
    this.element.setAttribute("aria-rowcount", size);
    this.refresh();
  }

  refresh() {
    this.shown.forEach((node) => node.remove());
    this.shown.clear();
    this.draw();
  }

  // The first and last row that are seen.
  range() {
    const first = Math.max(0, Math.floor(this.body.scrollTop / this.height) - SPARE);
    const seen = Math.ceil((this.body.clientHeight || 600) / this.height) + 2 * SPARE;
    return [first, Math.min(this.size, first + seen)];
  }

  paint() {
    const height = this.height;
    this.spacer.style.height = `${this.size * height}px`;
    const [first, last] = this.range();
    for (const [index, node] of this.shown) {
      if (index >= first && index < last) continue;
      node.remove();
      this.shown.delete(index);
    }
    for (let index = first; index < last; index += 1) {
      if (this.shown.has(index)) continue;
      const node = this.make(index);
      node.style.top = `${index * height}px`;
      this.shown.set(index, node);
      this.spacer.append(node);
    }
  }

  make(index) {
    const row = this.row(index);
    const cells = row?.cells ?? this.columns.map(() => "");
    return h(
      "div",
      { class: `lt-row ${row?.class ?? ""} ${row ? "" : "waiting"}`, role: "row", "aria-rowindex": index + 1, onclick: row?.onclick },
      cells.map((cell, k) => h("div", { class: `lt-cell ${this.columns[k].class ?? ""}`, role: "cell" }, cell)),
    );
  }

  scrollTo(index) {
    this.body.scrollTop = Math.max(0, (index - 3) * this.height);
  }

  close() {
    this.observer.disconnect();
  }
}

// Parts of every report: headline, warnings, comparison, costs.

import { h, lead, prose, section, svg, table } from "./dom.js";
import { count, isNumber, minus, number, score } from "./words.js";

// The result in large numbers and sentences; before the report, the number so far.
export function headline({ summary, is_written: isWritten }, result) {
  const big = ({ label, value, interval, is_gain: isGain }) =>
    h("p", { class: `number ${isGain ? "gain" : ""}` }, h("span", { class: "label" }, label), h("strong", null, minus(value)), interval && h("span", { class: "interval" }, minus(interval)));
  const numbers = summary.numbers.map(big);
  if (!isWritten && isNumber(result?.mean)) numbers.push(big({ label: result.label, value: number(result.mean) }));
  const texts = [[summary.sentence, "sentence"], ...summary.contexts.map((text) => [text, "context"])].filter(([text]) => text);
  if (!numbers.length && !texts.length) return "";
  return h("section", { class: "headline", "data-verdict": summary.verdict, "aria-label": "Result" },
    numbers.length ? h("div", { class: "numbers" }, numbers) : null,
    texts.map(([text, kind]) => h("p", { class: kind }, prose(text))));
}

export function warningsBox(warnings) {
  if (!warnings?.length) return "";
  return h("section", { class: "warnings", "aria-label": "Warnings" }, h("h2", null, count(warnings.length, "warning")), h("ul", null, warnings.map((text) => h("li", null, prose(text)))));
}

export function costsLine(costs, label = "In all") {
  return costs.length ? h("p", { class: "costs" }, h("b", null, label), costs.map((cost) => [" ", h("span", null, minus(cost))])) : "";
}

// Round ends of a scale for all means and intervals: 0.3 and 1 for values from 0.31 to 0.94.
export function scaleOf(rows) {
  const ends = rows.flatMap((row) => [row.mean, row.low, row.high]).filter(isNumber);
  if (!ends.length) return null;
  const [low, high] = [Math.min(...ends), Math.max(...ends)];
  const size = Math.max(1, Math.abs(low), Math.abs(high));
  if (high - low < 1e-9 * size) return { low: low - 0.1 * size, high: high + 0.1 * size };
  const step = 10 ** Math.floor(Math.log10(high - low));
  return { low: step * Math.floor(low / step), high: step * Math.ceil(high / step) };
}

export function intervalDrawing(row, scale, reference) {
  const at = (value) => `${(100 * (value - scale.low)) / (scale.high - scale.low)}%`;
  const line = (kind, x1, x2, y1, y2) => svg("line", { class: kind, x1: at(x1), x2: at(x2), y1, y2 });
  return svg("svg", { class: "range", "aria-hidden": "true", focusable: "false" },
    isNumber(reference?.mean) && line("reference", reference.mean, reference.mean, "0", "100%"),
    isNumber(row.low) && isNumber(row.high) && line("extent", row.low, row.high, "50%", "50%"),
    isNumber(row.mean) && svg("circle", { cx: at(row.mean), cy: "50%", r: 4.5 }));
}

const signedScore = (value) => (isNumber(value) ? (value >= -0.0005 ? "+" : "") + score(value) : "–");
const ends = (low, high, show) => (isNumber(low) && isNumber(high) ? `${show(low)} to ${show(high)}` : "");

// Table of rows with their intervals on one scale; gains are over the row `reference`.
export function comparison({ rows, name, what, gain, reference }) {
  const scale = scaleOf(rows);
  const line = (row) =>
    h("tr", { class: row.is_winner ? "winner" : null },
      h("th", { scope: "row" }, h("span", { class: "name" }, row.name), row.note && [" ", h("span", { class: "note" }, row.note)]),
      h("td", { class: "figure" }, h("b", null, score(row.mean)), " ", h("span", { class: "interval" }, ends(row.low, row.high, score))),
      h("td", { class: "plot" }, scale && intervalDrawing(row, scale, reference)),
      h("td", { class: "figure" }, row.gain && [h("b", null, signedScore(row.gain.mean)), " ", h("span", { class: "interval" }, row.gain && ends(row.gain.low, row.gain.high, signedScore))]),
      h("td", { class: `figure ${row.num_failed ? "failed" : ""}` }, count(row.num_failed)));
  const tick = (value) => minus(String(Number(value.toPrecision(6))));
  const plot = scale && h("span", { class: "ends", "aria-hidden": "true" }, h("span", null, tick(scale.low)), h("span", null, tick(scale.high)));
  const heads = [[name, null], [what, "figure"], [plot, "plot"], [gain, "figure"], ["Failed", "figure"]];
  return h("div", { class: "scroll" }, h("table", { class: "comparison" },
    h("thead", null, h("tr", null, heads.map(([text, kind]) => h("th", { scope: "col", class: kind }, text)))),
    h("tbody", null, rows.map(line))));
}

// Table of strings, as in the terminal; the first column names the row, `mark` is the winner's index.
export const stringTable = ({ columns, rows }, mark = -1) => table(columns.map((name, k) => (k ? [name] : name)), rows.map((cells, k) => ({ class: k === mark ? "winner" : null, cells: [h("span", { class: "name" }, cells[0]), ...cells.slice(1).map(minus)] })));

// pass@k; empty without several answers per task.
export const sampledSection = ({ sampled }) => (sampled ? section("Several answers to each task", lead("Drawn at random. pass@k is the best of k answers on average (the unbiased estimate); the majority is the answer that most gave."), stringTable(sampled)) : "");

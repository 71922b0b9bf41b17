// Compares runs: results, curves, reports, and differences between their configs.

import { lineChart } from "./charts.js";
import { brandLine, emptyNote, errorNote, h, place, runLink, section, table } from "./dom.js";
import { headline, intervalDrawing, scaleOf, stringTable } from "./report.js";
import { statusMark } from "./runs.js";
import { clip, count, duration, interval, isNumber, number, signed } from "./words.js";

const isTree = (value) => value !== null && typeof value === "object" && Object.keys(value).length > 0;

// Differing values by path, as deep as all configs have it: [["engine.model", ["\"a\"", "\"b\""]], ...].
function configDifferences(values, prefix = "") {
  if (values.every(isTree) && new Set(values.map(Array.isArray)).size === 1) {
    const names = [...new Set(values.flatMap((value) => Object.keys(value)))];
    return names.flatMap((name) => configDifferences(values.map((value) => value[name]), prefix ? `${prefix}.${name}` : name));
  }
  const texts = values.map((value) => (value === undefined ? undefined : JSON.stringify(value)));
  return texts.some((text) => text !== texts[0]) ? [[prefix, texts]] : [];
}

function numbersTable(runs) {
  const scale = scaleOf(runs.map(({ row }) => row.result ?? {}));
  const isOneScale = new Set(runs.map(({ row }) => row.kind)).size === 1; // an accuracy and a loss share no scale
  const drawing = (result) => (isNumber(result?.mean) && isOneScale ? intervalDrawing(result, scale) : "");
  const line = ({ row, title }) => [
    h("a", { class: "name", href: runLink(row.id) }, title ?? row.name), row.kind, statusMark(row),
    [h("b", null, isNumber(row.result?.mean) ? number(row.result.mean) : "–"), " ", h("span", { class: "interval" }, interval(row.result?.low, row.result?.high)), h("div", { class: "note" }, row.result?.label)],
    drawing(row.result), isNumber(row.result?.gain?.mean) ? signed(row.result.gain.mean) : "", duration(row.worked_s),
  ];
  return table(["Run", "Loop", "Status", ["Result, 95 % interval"], "", ["Gain"], ["Took"]], runs.map(line));
}

function configTable(runs) {
  const rows = configDifferences(runs.map((run) => run.config));
  if (!rows.length) return emptyNote("The configs are the same.");
  const cell = (value, first) => h("td", { class: value === first ? "same" : "differs" }, value === undefined ? "not set" : clip(value, 200));
  return h("div", { class: "scroll" },
    h("table", { class: "diff-table" },
      h("thead", null, h("tr", null, h("th", { scope: "col" }, "Value"), runs.map(({ row, title }) => h("th", { scope: "col" }, title ?? row.name)))),
      h("tbody", null, rows.map(([name, values]) => h("tr", null, h("th", { scope: "row" }, name), values.map((v, k) => cell(v, k ? values[0] : undefined)))))));
}

// Headlines and tables of the reports side by side; an unfinished run shows its result so far.
function reports(runs) {
  const one = ({ row, title, report }) => h("article", null, h("h3", null, title ?? row.name), report.summary ? [headline(report, row.result), report.summary.rows.length ? stringTable(report.summary) : ""] : emptyNote("Runs of this kind have no report."));
  return h("div", { class: "panels reports" }, runs.map(one));
}

function overlays(runs, charts) {
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.curves)))].sort();
  const shown = new Set(runs.map(({ row }) => row.spark_of)); // metrics of the sparklines come first
  const shared = names.filter((n) => runs.filter((run) => run.curves[n]).length > 1).sort((a, b) => shown.has(b) - shown.has(a));
  const panel = (name) => {
    const series = runs.filter((run) => run.curves[name]).map((run) => ({ name: run.title ?? run.row.name, points: run.curves[name] }));
    const chart = lineChart({ label: `${name} of each run`, series, height: 240 });
    charts.push(chart);
    return h("figure", null, h("figcaption", null, name), chart.box);
  };
  if (!shared.length) return emptyNote("These runs have no metric in common.");
  return h("div", { class: "panels" }, shared.map(panel));
}

export async function showCompare(source, main, isShown) {
  const named = place().query.getAll("runs").filter(Boolean);
  const ids = named.length === 1 ? named[0].split(",") : named; // older links join the ids by commas
  const charts = [];
  main.replaceChildren(h("header", { class: "masthead" }, brandLine("", ids), h("h1", null, `${count(ids.length, "run")} side by side`)));
  document.title = `${count(ids.length, "run")} · Rookery`;
  const load = async (id) => {
    const path = `runs/${encodeURIComponent(id)}`;
    const [overview, curves, report] = await Promise.all([source.get(path), source.get(`${path}/curves`, { points: 500 }), source.get(`${path}/report`)]);
    return { ...overview, curves: curves.curves, report };
  };
  const results = await Promise.allSettled(ids.map(load));
  if (!isShown()) return { close: () => {} };
  const runs = results.filter((one) => one.status === "fulfilled").map((one) => one.value);
  const isTwin = ({ row }) => runs.filter((other) => other.row.name === row.name).length > 1;
  for (const run of runs.filter(isTwin)) run.title = run.row.id; // runs with the same name are titled by id
  const failed = results.filter((one) => one.status === "rejected").map((one) => errorNote(one.reason));
  main.append(...failed);
  if (runs.length) main.append(section("Results", numbersTable(runs)), section("Curves", overlays(runs, charts)), section("Reports", reports(runs)), section("What differs in their configs", configTable(runs)));
  else main.append(emptyNote("Select two or more runs in the list of runs."));
  return { close: () => charts.forEach((chart) => chart.close()) };
}

// The page of one run: state, loop view, curves, events, config, report.

import { library, lineChart } from "./charts.js";
import { brandLine, emptyNote, errorNote, facts, h, later, placed, prose, refill, runLink, section } from "./dom.js";
import { EvalView } from "./eval.js";
import { EventsView, jsonTree } from "./events.js";
import { EvolveView } from "./evolve.js";
import { GenomeView } from "./genome.js";
import { GrpoView } from "./grpo.js";
import { IcmView } from "./icm.js";
import { LeagueView } from "./league.js";
import { comparison, costsLine, headline, warningsBox } from "./report.js";
import { progressBar, statusMark } from "./runs.js";
import { AGAIN_MS, grouped, mergeView, Metrics } from "./source.js";
import { clock, count, duration, number, six } from "./words.js";

const LOOP_VIEWS = new Map(Object.entries({ genome: GenomeView, grpo: GrpoView, icm: IcmView, evolve: EvolveView, eval: EvalView, league: LeagueView, pipeline: EvalView }));
const POINTS = 600;
const TABS = new Map([["overview", "Overview"], ["curves", "Curves"], ["events", "Events"], ["config", "Config"]]);

// All metrics, grouped by their name before the slash.
class CurvesView {
  constructor({ source, path }) {
    this.source = source;
    this.metrics = new Metrics(source, path, POINTS);
    this.charts = new Map();
    this.element = h("section", { "aria-label": "Curves" }, emptyNote("Reading the metrics …"));
    this.update();
  }

  async update() {
    try {
      this.draw(await this.metrics.update());
    } catch (error) {
      this.element.replaceChildren(errorNote(error));
    }
  }

  draw(curves) {
    const names = [...curves.keys()];
    const isSame = names.length === this.charts.size && names.every((n) => this.charts.has(n));
    if (!names.length) this.element.replaceChildren(emptyNote("No metrics are written."));
    else if (isSame) names.forEach((n) => this.grow(this.charts.get(n), n));
    else this.build(names);
  }

  // What is zoomed into is read again, with all its points.
  grow(chart, name) {
    if (chart.isZoomed) chart.tellZoom();
    else chart.setSeries([{ name, points: this.metrics.curves.get(name) }]);
  }

  build(names) {
    this.close();
    this.charts = new Map();
    const lead = h("p", { class: "lead" }, "Drag to move, pinch or Ctrl and wheel to zoom, double-click for all. Every extreme is kept.");
    const groups = [...groupNames(names)].map(([group, members]) => h("div", { class: "curve-group" }, h("h2", null, group), h("div", { class: "panels" }, members.map((n) => this.panel(n)))));
    this.element.replaceChildren(lead, ...groups);
  }

  panel(name) {
    const points = this.metrics.curves.get(name);
    const zoom = later(async (first, last) => {
      if (this.source.isLive && !chart.isClosed) chart.setSeries([{ name, points: await this.metrics.zoom(name, first, last) }]);
    }, 200);
    const chart = lineChart({ label: name, series: [{ name, points }], onzoom: zoom });
    this.charts.set(name, chart);
    return h("figure", null, h("figcaption", null, name, h("span", { class: "note" }, six(points.at(-1)?.[1]))), chart.box);
  }

  close() {
    this.charts.forEach((chart) => chart.close());
  }
}

// Comparison and costs for a loop without a view of its own.
function plainResult({ rows = [], summary }) {
  const compared = comparison({ rows, name: "Result", what: "Reward", gain: "Gain", reference: rows.find((row) => !row.is_winner) });
  return [rows.length ? section("The result beside what it is compared with", compared) : "", costsLine(summary.costs)];
}

function groupNames(names) {
  const inOrder = [...names].sort((a, b) => a.startsWith("time/") - b.startsWith("time/"));
  return grouped(inOrder, (name) => name.split("/")[0]);
}

class RunPage {
  constructor(source, main, id) {
    this.source = source;
    this.main = main;
    this.id = id;
    this.path = `runs/${encodeURIComponent(id)}`;
    this.tab = placed("tab", [...TABS.keys()]);
    this.view = null;
    this.retry = later(() => this.isClosed || this.refresh(), AGAIN_MS);
  }

  async start(isShown) {
    library().catch(() => {}); // loads while the run is read
    this.ask();
    this.overview = await this.source.get(this.path);
    if (!isShown()) return;
    this.build();
    await this.open();
    const follow = later(() => this.refresh(), 30);
    this.stop = this.source.follow(`${this.path}/stream`, (pulse) => {
      const known = this.overview.pulse;
      this.tellLost("");
      if (Object.keys(pulse).some((key) => pulse[key] !== known[key])) follow();
    }, follow); // the refresh shows why the stream ended
    if (this.view?.isMore) follow();
    this.clock = setInterval(() => this.head(), 20000);
  }

  ask() {
    if (this.tab === "overview") this.asked = ["view", "report"].map((part) => this.source.get(`${this.path}/${part}`));
    this.asked?.forEach((answer) => answer.catch(() => {})); // awaiting callers still get the error
  }

  tellLost(reason) {
    this.lost.hidden = !reason;
    this.lost.replaceChildren(...prose(`${reason} This is the last that was seen.`));
  }

  build() {
    this.header = h("header", { class: "masthead" });
    this.lost = h("p", { class: "trouble", role: "alert", hidden: true });
    const tabLink = ([tab, label]) => h("a", { href: tab === "overview" ? runLink(this.id) : runLink(this.id, { tab }), "aria-current": tab === this.tab ? "page" : null }, label);
    this.tabs = h("nav", { class: "tabs", "aria-label": "Parts of the run" }, [...TABS].map(tabLink));
    this.body = h("div", { class: "tab-body" }, emptyNote("Reading the run …"));
    this.main.replaceChildren(this.header, this.lost, this.tabs, this.body);
    this.head();
  }

  head() {
    const { row } = this.overview;
    if (this.header.isConnected) document.title = `${row.name} · Rookery`;
    const details = row.started_s ? [["Started", clock(row.started_s)], ["Took", duration(row.worked_s)], ["Events", count(row.num_events)]] : []; // unknown for an unreadable run
    details.push(["Folder", row.path]);
    const described = this.report?.summary?.facts.length ? this.report.summary.facts : [["Model", row.model]];
    const link = ({ run, id }) => id && this.source.isLive ? h("a", { href: runLink(id) }, run) : run;
    const tell = (from) => from.map((each, k) => [k ? ", " : "", link(each), `/${each.part}`, each.made_from?.length ? [" (from ", tell(each.made_from), ")"] : ""]);
    const from = this.overview.made_from;
    if (from.length) details.unshift(["Made from", tell(from).flat(Infinity)]);
    refill(this.header,
      this.source.isLive ? brandLine("") : h("p", { class: "brand" }, "Rookery"),
      h("h1", null, row.name),
      h("p", { class: "state" }, statusMark(row), progressBar(row.progress, row.status === "running"), row.reason && h("span", { class: "reason" }, row.reason)),
      facts([["Loop", row.kind], ...described, ...details].filter(([, detail]) => detail)),
    );
  }

  async open() {
    const { row, counts, config } = this.overview;
    if (this.tab === "curves") this.part = new CurvesView(this);
    else if (this.tab === "events") this.part = new EventsView(this.source, this.id, counts);
    else if (this.tab === "config") this.part = { element: h("section", { "aria-label": "Config" }, jsonTree(config)) };
    else this.part = await this.openLoop(row.kind).catch((error) => ({ element: errorNote(error), isBroken: true })); // other tabs may still work
    this.body.replaceChildren(this.part.element);
  }

  async openLoop(kind) {
    const Loop = LOOP_VIEWS.get(kind) ?? CurvesView;
    const [view, report] = await Promise.all(this.asked);
    this.view = mergeView(null, view);
    this.report = report;
    this.top = h("div");
    this.drawTop();
    const loop = new Loop({ source: this.source, path: this.path, view: this.view, report }); // a loop without a view shows its curves
    return { element: h("div", null, this.top, loop.element), update: (...news) => loop.update(...news), close: () => loop.close() };
  }

  drawTop() {
    this.head();
    const { summary, warnings } = this.report;
    const said = summary ? headline(this.report, this.overview.row.result) : emptyNote("Nothing is reported: the curves and events say all.");
    refill(this.top, said, warningsBox(warnings), ...(summary && !LOOP_VIEWS.has(this.overview.row.kind) ? plainResult(this.report) : []));
  }

  // Updates the head and the open tab with new data only.
  async refresh() {
    if (this.refreshing) {
      this.again = true;
      return;
    }
    this.refreshing = true;
    const { pulse, row } = this.overview;
    try {
      this.overview = await this.source.get(this.path);
      if (this.isAnother(row)) {
        dispatchEvent(new Event("hashchange"));
        return;
      }
      this.head();
      await this.growPart(pulse);
      this.tellLost("");
    } catch (error) {
      this.tellLost(error.message);
      this.overview.pulse = pulse; // not all of what is new is shown
      this.retry();
    }
    this.refreshing = false;
    if (this.again && !this.isClosed) {
      this.again = false;
      await this.refresh();
    }
  }

  // Whether another run has replaced this one, which makes all loaded data stale.
  isAnother({ started_s: known }) {
    const { started_s: began } = this.overview.row;
    return known && began && known !== began; // 0 while the run cannot be read
  }

  async growPart(known) {
    if (this.part.isBroken) {
      this.ask();
      await this.open();
    } else if (this.part instanceof EventsView) this.part.grow(this.overview.counts);
    else if (this.part instanceof CurvesView) await this.part.update();
    else if (this.view && this.part.update) {
      this.view = mergeView(this.view, await this.source.get(`${this.path}/view`, { after: this.view.seq }));
      this.again ||= this.view.isMore;
      if (this.overview.pulse.report !== known.report) this.report = await this.source.get(`${this.path}/report`);
      this.drawTop();
      await this.part.update(this.view, this.report);
    }
  }

  close() {
    this.isClosed = true;
    clearInterval(this.clock);
    this.stop?.();
    this.part?.close?.();
  }
}

export async function showRun(source, main, id, isShown) {
  const page = new RunPage(source, main, id);
  await page.start(isShown);
  return page;
}


// A training: rewards, metrics by panel, time by stage, and completions by step.

import { lineChart } from "./charts.js";
import { choice, emptyNote, errorNote, facts, figure, folded, h, lead, longText, note, place, placed, refold, section, table } from "./dom.js";
import { comparison, costsLine, sampledSection, stringTable } from "./report.js";
import { listed, Metrics } from "./source.js";
import { count, interval, isNumber, number, score, signed } from "./words.js";

// Panels of related metrics. Unmeasured metrics are left out; constant ones share one line of text.
// A name that ends with _ or / is a prefix.
const PANELS = [
  ["Loss", ["train/loss"]],
  ["KL to the reference", ["train/kl", "grpo/kl"]],
  ["Change since drawn, nats", ["grpo/logprob_drift"]],
  ["Engine/trainer gap, nats", ["grpo/logprob_gap", "train/mismatch"]],
  ["Entropy", ["train/entropy"]],
  ["Clipped share", ["train/clip_"]],
  ["Mean ratio", ["train/ratio"]],
  ["Tokens of an answer", ["length"]],
  ["Groups", ["grpo/num_groups", "grpo/num_equal_groups"]],
  ["Failed rollouts", ["grpo/num_failed_rollouts"]],
  ["Staleness, steps", ["grpo/staleness"]],
  ["Gradient norm", ["train/grad_norm"]],
  ["Learning rate", ["train/learning_rate"]],
  ["Game", ["game/"]],
  ["Seconds by stage", ["time/"]],
];
const SAME = 1e-6; // relative differences below this are rounding
const MOST_GROUPS = 200;
const EXCHANGE = /^(?:system|user): [^]*\nassistant: /; // the text of a game of several turns

const short = (metric) => metric.split("/").slice(1).join("/") || metric;

function isConstant(points) {
  const values = points.map(([, y]) => y).filter(isNumber);
  return values.length > 0 && Math.max(...values) - Math.min(...values) <= SAME * Math.max(...values.map(Math.abs));
}

export class GrpoView {
  constructor({ source, path, view, report }) {
    Object.assign(this, { source, path });
    this.metrics = new Metrics(source, path, 500);
    this.charts = new Map();
    [this.results, this.reward, this.panels, this.constants, this.selects, this.costs, this.answers] = Array.from({ length: 7 }, () => h("div"));
    this.panels.className = "panels";
    this.slider = h("input", { type: "range", min: 0, max: 0, "aria-label": "Step", oninput: (e) => this.open(this.steps[Number(e.target.value)]) });
    this.stepName = h("output");
    this.order = choice("Order", [["", "in the order of tasks"], ["best", "highest mean reward first"], ["spread", "widest rewards first"]], "", () => this.drawStep());
    this.colour = choice("Colour", [["", "coloured by advantage"], ["gap", "coloured by gap"]], placed("colour", ["", "gap"]), (colour) => { note({ colour }); this.drawStep(); });
    this.element = h("div", null,
      this.results,
      section("The training", lead("The mean reward of the answers that were drawn in each step, give or take one standard deviation, and of the checkpoints on the select tasks. The two may differ: training draws at its own temperature. Drag to move, Ctrl and wheel to zoom, double-click for all."), this.reward, this.panels, this.constants, this.selects, this.costs),
      section("Completions of a step", h("div", { class: "bar" }, this.slider, this.stepName, this.order, this.colour), this.answers));
    this.wanted = place().query.get("step");
    this.update(view, report);
  }

  async update(view, report) {
    this.report = report;
    const { chosen } = report; // set for a sweep, whose adapters have runs of their own
    this.checkpoints = chosen ? report.checkpoints.map((one) => ({ id: String(one.step), mean: one.mean, is_best: one.is_chosen })) : listed(view, "selects");
    const steps = chosen ? Object.keys(chosen.steps) : listed(view, "steps").map((row) => row.id);
    this.steps = steps.map(Number).sort((a, b) => a - b);
    this.slider.max = Math.max(0, this.steps.length - 1);
    this.slider.disabled = this.steps.length < 2;
    this.drawReport(report);
    if (!this.steps.length) this.answers.replaceChildren(emptyNote("Nothing is drawn yet."));
    else if (this.shown === undefined || !this.isChosen) this.open(this.wanted !== null && this.steps.includes(Number(this.wanted)) ? Number(this.wanted) : this.steps.at(-1), this.wanted !== null);
    try {
      this.drawCurves(await this.metrics.update());
    } catch (error) {
      this.panels.replaceChildren(errorNote(error));
    }
  }

  drawReport(report) {
    const { rows, summary } = report;
    this.results.replaceChildren(section("On tasks that the training never saw", rows.length ? comparison({ rows, name: "Policy", what: "Reward", gain: "Gain over the start", reference: rows.find((row) => !row.is_winner) }) : emptyNote("Nothing is compared yet.")), sampledSection(report), this.sweepSection(report));
    const line = (row) => ({ class: row.is_best ? "winner" : null, cells: [row.id, h("b", null, score(row.mean))] });
    const best = this.checkpoints.filter((row) => row.is_best).at(-1);
    const rowsOf = this.checkpoints.map((row) => line({ ...row, is_best: row === best }));
    if (rowsOf.length) refold(this.selects, "Checkpoints", () => table([["Step"], ["Reward on the select tasks"]], rowsOf));
    this.costs.replaceChildren(costsLine(summary.costs.filter((cost) => !cost.startsWith("0 "))));
  }

  sweepSection({ sweep, settings }) {
    if (!sweep) return "";
    const result = ({ row }) => row && [h("b", null, score(row.mean)), " ", h("span", { class: "interval" }, interval(row.low, row.high))];
    const line = (one) => ({ class: one.is_chosen ? "winner" : null, cells: [[h("span", { class: "name" }, one.name), one.error && h("span", { class: "note" }, ` ${one.error}`)], score(one.select), count(one.chosen_step), result(one), isNumber(one.row?.gain?.mean) ? signed(one.row.gain.mean) : ""] });
    return section(`${count(sweep.adapters.length, "adapter")} in one run`, lead("Ranked by the select tasks alone; the report tasks were read once, after the choice. Each setting is the mean of its seeds. All other sections are about the chosen adapter."), stringTable(settings, 0), folded("Every adapter", () => table(["Adapter", ["Select"], ["Step"], ["Report"], ["Gain over the start"]], sweep.adapters.map(line))));
  }

  drawCurves(curves) {
    const named = new Map([...Object.entries(this.report.chosen?.curves ?? {}), ...curves]);
    const answers = new Map(curves.get("grpo/num_rollouts") ?? []);
    const lengths = (curves.get("grpo/num_drawn_tokens") ?? []).filter(([x]) => answers.get(x)).map(([x, y]) => [x, y / answers.get(x)]);
    if (lengths.length) named.set("length", lengths);
    this.drawReward(named);
    const constants = [];
    for (const [title, wanted] of PANELS) {
      const measured = [...named].filter(([metric]) => wanted.some((w) => (/[/_]$/.test(w) ? metric.startsWith(w) : metric === w)));
      const isStacked = title === "Seconds by stage";
      if (!measured.length) continue;
      const isOneOf = measured.length === 1 && measured[0][0] !== wanted[0];
      if (isStacked || measured.some(([, points]) => !isConstant(points))) this.panel(isOneOf ? `${title}, ${short(measured[0][0])}` : title, measured.map(([metric, points]) => ({ name: short(metric), points, isStacked })), this.panels);
      else constants.push(...measured.map(([metric, points]) => `${measured.length > 1 || isOneOf ? `${title}, ${short(metric)}` : title}: ${number(points.at(-1)[1], 4).replace(/\.?0+$/, "")}`));
    }
    if (!named.size) this.panels.replaceChildren(emptyNote("No step is taken yet."));
    this.constants.replaceChildren(costsLine(constants, "In every step"));
  }

  panel(title, series, box, options) {
    const known = this.charts.get(title);
    if (known) return known.setSeries(series);
    if (box === this.panels && !box.querySelector("figure")) box.replaceChildren();
    const chart = lineChart({ label: `${title} over the steps`, series, ...options });
    this.charts.set(title, chart);
    box.append(figure(title, chart));
    return chart;
  }

  drawReward(named) {
    const deviation = new Map(named.get("reward/std") ?? []);
    const mean = named.get("reward/mean") ?? [];
    const band = mean.filter(([x, y]) => isNumber(y) && isNumber(deviation.get(x))).map(([x, y]) => [x, y - deviation.get(x), y + deviation.get(x)]);
    const adapters = [...named].filter(([metric]) => metric.startsWith("reward/") && !["reward/mean", "reward/std"].includes(metric));
    const series = adapters.map(([metric, points]) => ({ name: short(metric), points }));
    if (mean.length) series.unshift({ name: adapters.length ? "mean of all adapters" : "drawn answers", points: mean, band });
    const points = this.checkpoints.filter((row) => isNumber(row.mean)).map((row) => [Number(row.id), row.mean]);
    if (points.length) series.push({ name: "select tasks", points, isMarked: true });
    if (series.length) this.panel("Reward", series, this.reward, { height: 320 });
  }

  async open(step, isChosen = true) {
    this.isChosen = isChosen;
    if (step === undefined || this.shown === step) return;
    this.shown = step;
    if (isChosen) note({ step });
    this.slider.value = this.steps.indexOf(step);
    this.stepName.textContent = `step ${step}`;
    try {
      const content = await this.source.get(`${this.path}/step/${step}`);
      if (this.shown !== step) return;
      this.content = content;
      this.drawStep();
    } catch (error) {
      this.answers.replaceChildren(errorNote(error));
    }
  }

  // Draws each group; the colour shows the advantage, the reward minus the group's mean.
  drawStep() {
    if (!this.content) return;
    const { groups, is_whole: isWhole, gap } = this.content;
    if (this.colour.value) {
      this.answers.replaceChildren(...(gap ? gapNodes(gap) : [emptyNote("No gap is kept of this step: it comes with steps that are trained from now on.")]));
      return;
    }
    const rewards = (group) => group.rollouts.map((r) => r.reward).filter(isNumber);
    const mean = (group) => rewards(group).reduce((a, b) => a + b, 0) / (rewards(group).length || 1);
    const spread = (group) => Math.max(...rewards(group)) - Math.min(...rewards(group));
    const by = { best: (a, b) => mean(b) - mean(a), spread: (a, b) => spread(b) - spread(a) }[this.order.value];
    const said = isWhole ? `${count(groups.length, "group")} with all their completions, coloured by their advantage: how far the reward is above the mean of its group.` : "The best and the worst answer of one group: the others are not kept.";
    const prompts = new Map(Object.entries(this.report.prompts ?? {}));
    const shown = (by ? [...groups].sort(by) : groups).slice(0, MOST_GROUPS);
    this.answers.replaceChildren(lead(said), ...shown.map((group) => groupNode(group, prompts.get(group.task))));
  }

  close() {
    this.charts.forEach((chart) => chart.close());
  }
}

function groupNode(group, [prompt, reference] = []) {
  const rewards = group.rollouts.map((r) => r.reward).filter(isNumber);
  const mean = rewards.reduce((a, b) => a + b, 0) / (rewards.length || 1);
  const most = Math.max(1e-9, ...group.rollouts.map((r) => Math.abs(r.advantage ?? (r.reward ?? mean) - mean)));
  const row = (r) => {
    const advantage = r.advantage ?? (r.reward ?? mean) - mean;
    const node = h("div", { class: `completion-row ${advantage >= 0 ? "up" : "down"}` }, h("span", { class: "figure" }, number(r.reward, 2)), h("span", { class: "figure advantage" }, (advantage >= 0 ? "+" : "") + number(advantage, 2)), EXCHANGE.test(r.text) ? turns(r.text) : longText("answer", r.text ?? ""));
    node.style.setProperty("--share", `${Math.round((55 * Math.abs(advantage)) / most)}%`);
    return node;
  };
  const details = [prompt && ["Task", prompt], reference && ["Reference", reference]].filter(Boolean);
  return h("article", { class: "group" }, h("h3", null, group.task, h("span", { class: "note" }, ` mean reward ${number(mean, 2)}`)), details.length ? facts(details) : "", group.rollouts.map(row));
}

// The best and the worst answer of a group, token by token; a deeper colour is a larger gap between
// engine and trainer.
function gapNodes({ task, is_fresh: isFresh, answers }) {
  const sizes = answers.flat().map(([, gap]) => Math.abs(gap ?? 0));
  const most = Math.max(1e-12, ...sizes);
  const token = ([text, gap]) => {
    const node = h("span", { class: `token ${gap < 0 ? "down" : "up"}`, title: isNumber(gap) ? `${gap < 0 ? "" : "+"}${number(gap, 4)} nats` : "not a number" }, text);
    node.style.setProperty("--share", `${Math.round((100 * (isNumber(gap) ? Math.abs(gap) : most)) / most)}%`);
    return node;
  };
  const mean = sizes.reduce((a, b) => a + b, 0) / (sizes.length || 1);
  const said = isFresh ? "" : " They were drawn with older weights: the gap is also how far the policy has moved since.";
  const row = (tokens, k) => [h("h4", null, k ? "Worst answer" : "Best answer"), h("pre", { class: "answer tokens" }, tokens.map(token))];
  return [lead(`Log-probability in the trainer less that in the engine, of every token that was drawn: ${number(mean, 4)} nats on average, ${number(most, 4)} at most. Green is likelier in the trainer, orange in the engine.${said}`), h("article", { class: "group" }, h("h3", null, task), answers.map(row))];
}

// A game turn by turn, with the role of each speaker.
function turns(text) {
  const turn = (one) => {
    const [, role, words] = /^(\w+): ([^]*)$/.exec(one) ?? [null, "", one];
    return h("div", { class: `turn ${role === "assistant" ? "own" : ""}` }, h("span", { class: "note" }, role), h("pre", null, words));
  };
  return h("div", { class: "answer turns" }, text.split(/\n(?=(?:system|user|assistant|tool): )/).map(turn));
}

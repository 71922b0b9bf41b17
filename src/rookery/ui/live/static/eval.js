// An evaluation: models, and the answers to each task.

import { choice, el, emptyNote, errorNote, h, lead, longText, note, placed, refill, runLink, section, table } from "./dom.js";
import { comparison, costsLine, sampledSection } from "./report.js";
import { listed } from "./source.js";
import { LongTable, PLAIN } from "./table.js";
import { count, duration, isNumber, number } from "./words.js";

const WHICH = [["", "all tasks"], ["wrong", "some answer wrong"], ["right", "all answers right"], ["differ", "models differ"], ["failed", "failed"]];
const isRight = (reward) => isNumber(reward) && reward >= 1;

export class EvalView {
  constructor({ source, path, view, report }) {
    Object.assign(this, { source, path });
    this.only = placed("only", WHICH.map(([only]) => only));
    this.models = h("div");
    this.filter = choice("Which tasks", WHICH, this.only, (only) => this.set(only));
    this.state = h("span", { class: "note" });
    this.box = h("div");
    this.detail = h("div", { class: "detail", "aria-live": "polite" }, emptyNote("Choose a task to read its answers."));
    this.answers = section("Answers", h("div", { class: "bar" }, this.filter, this.state), h("div", { class: "split" }, this.box, this.detail));
    this.element = h("div", null, this.models, this.answers);
    this.update(view, report);
  }

  update(view, report) {
    const begun = ({ answers }) => Math.min(...Object.values(answers).map(([[, , seq]]) => seq));
    const inOrder = listed(view, "tasks").map((task) => [begun(task), task]).sort(([a], [b]) => a - b);
    this.tasks = inOrder.map(([, task]) => task); // each with its answers, keyed by place in `models`
    this.names = view.facts.models ?? [];
    this.asked = new Map(report.tasks.map((t) => [t.task, t]));
    this.report = report;
    this.drawModels(view, report);
    if (this.columns !== this.names.map((n) => this.title(n)).join()) this.makeTable();
    this.arrange();
  }

  // The report's name of `trained@1f2e`; models that share a name get their version too.
  title(model) {
    const [short] = model.split("@");
    const known = this.report.models.filter(({ version }) => version && model.endsWith(`@${version}`)).map(({ name }) => name).join(", ");
    const isTwin = this.names.some((other) => other !== model && other.split("@")[0] === short);
    return known || (isTwin ? `${short} ${model.slice(short.length + 1, short.length + 9)}` : short);
  }

  drawModels(view, report) {
    const live = this.names.map((name, place) => {
      const measured = this.tasks.flatMap(({ answers }) => answers[place]?.slice(0, 1) ?? []);
      const rewards = measured.map(([reward]) => reward).filter(isNumber);
      return { name: this.title(name), mean: rewards.length ? rewards.reduce((a, b) => a + b, 0) / rewards.length : null, num_failed: measured.filter(([, isFailed]) => isFailed).length };
    });
    const rows = report.models.length ? report.models : live;
    const said = report.models.length ? "Mean reward with its 95 % interval." : "So far, without intervals: they come with the report.";
    const best = rows.reduce((a, b) => (a && (a.mean ?? -Infinity) >= (b.mean ?? -Infinity) ? a : b), null);
    const marked = rows.map((row) => ({ ...row, is_winner: row === best && rows.some((other) => (other.mean ?? -Infinity) < best.mean) }));
    refill(this.models, this.steps(report), section("Models", lead(said), rows.length ? comparison({ rows: marked, name: "Model", what: "Accuracy", gain: "Gain over base", reference: rows[0] }) : emptyNote("No answer is recorded yet."), costsLine(report.summary.costs)), sampledSection(report));
  }

  // Steps of a pipeline, each a run in the same folder.
  steps({ steps }) {
    if (!steps?.length) return "";
    const link = ({ name, run }) => (this.source.isLive ? h("a", { class: "name", href: runLink(run) }, name) : h("span", { class: "name" }, name));
    const line = (step) => ({ cells: [link(step), step.loop, step.made_from.join(", "), step.result, duration(step.seconds)] });
    return section("Steps", lead("Each is a run of its own. No step has seen the tasks below."), table(["Step", "Loop", "Made from", ["Result"], ["Took"]], steps.map(line)));
  }

  makeTable() {
    this.columns = this.names.map((n) => this.title(n)).join();
    this.table?.close();
    this.table = new LongTable({ columns: [{ name: "task", label: "Task", class: "run" }, ...this.names.map((n) => ({ name: n, label: this.title(n), class: "figure" }))], kind: "tasks", label: "Tasks", row: (i) => this.cells(i) });
    this.box.replaceChildren(this.table.element);
  }

  set(only) {
    this.only = only;
    note({ only });
    this.arrange();
  }

  arrange() {
    const tests = { wrong: (as) => as.some(([reward]) => !isRight(reward)), right: (as) => as.every(([reward]) => isRight(reward)), differ: (as) => new Set(as.map(([reward]) => reward)).size > 1, failed: (as) => as.some(([, isFailed]) => isFailed) };
    const measured = (answers) => Object.values(answers).map(([first]) => first); // further answers are for pass@k
    this.chosen = this.only ? this.tasks.filter(({ answers }) => tests[this.only](measured(answers))) : this.tasks;
    this.answers.hidden = !this.tasks.length;
    this.state.textContent = `${count(this.chosen.length)} of ${count(this.tasks.length, "task")}`;
    this.table?.resize(this.chosen.length);
  }

  cells(index) {
    const row = this.chosen[index];
    if (!row) return null;
    const { id: task, answers } = row;
    const [right, partly, wrong] = [["right", "✓"], ["", "◐"], ["wrong", "✗"]];
    const mark = ([[reward, isFailed]]) => {
      if (isFailed) return el("b", null, "failed");
      const [kind, sign] = isRight(reward) ? right : reward > 0 ? partly : wrong;
      return el("span", { class: kind }, `${sign} ${number(reward, 2)}`);
    };
    return { key: task, onclick: () => this.open(task), cells: [el("button", PLAIN, this.asked.get(task)?.prompt?.slice(0, 120) || task), ...this.names.map((_, place) => (answers[place] ? mark(answers[place]) : ""))] };
  }

  async open(task) {
    this.picked = task;
    const { answers } = this.tasks.find(({ id }) => id === task);
    try {
      const seqs = Object.values(answers).flatMap((each) => each.map(([, , seq]) => seq));
      const events = await Promise.all(seqs.map((seq) => this.source.get(`${this.path}/event/${seq}`)));
      if (this.picked !== task) return;
      const asked = this.asked.get(task);
      const answer = ({ payload }) => [h("h4", null, this.title(String(payload.model)), h("span", { class: "note" }, payload.error ? " failed" : ` reward ${number(payload.reward, 2)}`)), longText("answer", String(payload.completion?.text ?? payload.error ?? ""))];
      this.detail.replaceChildren(h("h3", null, task), asked ? longText("answer prompt", asked.prompt) : "", asked?.reference ? h("p", { class: "note" }, `reference: ${asked.reference}`) : "", ...events.flatMap(answer));
    } catch (error) {
      this.detail.replaceChildren(errorNote(error));
    }
  }

  close() {
    this.table?.close();
  }
}

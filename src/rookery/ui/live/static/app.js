// Entry point: shows the view that the address names.

import { showCompare } from "./compare.js";
import { brandLine, errorNote, h, place } from "./dom.js";
import { showFleet, showService } from "./fleet.js";
import { showRun } from "./run.js";
import { showRuns } from "./runs.js";
import { openSource } from "./source.js";

const OTHERS = new Map([["compare", showCompare], ["fleet", showFleet], ["service", showService]]);
const main = document.getElementById("main");
let shown = null;
let turn = 0;

async function show(source) {
  turn += 1;
  const mine = turn;
  const isShown = () => mine === turn; // false once another view was opened
  shown?.close();
  shown = null;
  const [kind, id] = place().parts;
  const run = source.isLive ? id : source.saved.id;
  try {
    const other = OTHERS.get(kind);
    const view = await (other ? other(source, main, isShown) : run !== undefined ? showRun(source, main, run, isShown) : showRuns(source, main));
    if (isShown()) shown = view;
    else view.close();
  } catch (error) {
    if (!isShown()) return;
    main.replaceChildren(h("header", { class: "masthead" }, source.isLive && brandLine(""), h("h1", null, "This cannot be shown")), errorNote(error));
  }
}

const source = await openSource();
addEventListener("hashchange", () => show(source));
await show(source);

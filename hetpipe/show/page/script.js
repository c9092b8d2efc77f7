"use strict";
(() => {
  const read = (id) => JSON.parse(document.getElementById(id).textContent);
  const stages = read("stages");
  const details = document.getElementById("details");
  const line = (parent, tag, text) => {
    const node = document.createElement(tag);
    node.textContent = text;
    parent.append(node);
    return node;
  };
  // Hover or focus shows the layers of a stage.
  const show = (event) => {
    const mark = event.target.closest ? event.target.closest("[data-stage]") : null;
    const stage = mark && stages[mark.dataset.stage];
    if (!stage || details.dataset.shown === mark.dataset.stage) return;
    details.dataset.shown = mark.dataset.stage;
    details.replaceChildren();
    line(details, "strong", stage.text);
    const list = line(details, "ol", "");
    for (const layer of stage.layers) line(list, "li", layer);
  };
  for (const name of ["mouseover", "focusin", "click"]) document.addEventListener(name, show);

  // A slider moves a cut by a layer; every position was simulated when the page was made.
  const cuts = read("cuts");
  const select = document.getElementById("cut");
  if (!select) return;
  const slider = document.getElementById("by");
  const output = document.getElementById("moved");
  const move = () => {
    const position = cuts[select.value].moves[slider.value];
    slider.setAttribute("aria-valuetext", position.said);
    output.dataset.seconds = position.seconds;
    output.replaceChildren();
    line(output, "strong", position.step);
    line(output, "div", position.said);
    line(output, "div", position.memory);
  };
  const choose = () => {
    const moves = cuts[select.value].moves;
    slider.max = moves.length - 1;
    slider.value = moves.findIndex((position) => position.by === 0);
    move();
  };
  select.addEventListener("change", choose);
  slider.addEventListener("input", move);
  choose();
})();

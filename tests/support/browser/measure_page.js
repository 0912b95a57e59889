// Inspects the pages in all iframes from the outside and writes the findings as JSON.
"use strict";

function rgb(color) {
  const parts = color.match(/[\d.]+/g).map(Number);
  return { red: parts[0], green: parts[1], blue: parts[2], alpha: parts.length > 3 ? parts[3] : 1 };
}

function luminance(color) {
  const linear = [color.red, color.green, color.blue].map((value) => {
    const part = value / 255;
    return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
}

function contrast(one, other) {
  const [light, dark] = [luminance(one), luminance(other)].sort((a, b) => b - a);
  return (light + 0.05) / (dark + 0.05);
}

function background(element, view) {
  for (let at = element; at; at = at.parentElement) {
    const color = rgb(view.getComputedStyle(at).backgroundColor);
    if (color.alpha === 1) return color;
  }
  return null;
}

function box(rect) {
  return [rect.left, rect.top, rect.right, rect.bottom].map((value) => Math.round(value * 10) / 10);
}

// Returns the bounding boxes of all visible text, one per line.
function texts(page, view) {
  const walker = page.createTreeWalker(page.body, NodeFilter.SHOW_TEXT);
  const found = [];
  while (walker.nextNode()) {
    const node = walker.currentNode;
    const owner = node.parentElement;
    if (!node.data.trim() || owner.closest("title, style, defs")) continue;
    const range = page.createRange();
    range.selectNodeContents(node);
    const style = view.getComputedStyle(owner);
    const color = rgb(owner instanceof view.SVGElement ? style.fill : style.color);
    const behind = background(owner, view);
    for (const rect of range.getClientRects()) {
      if (rect.width < 0.5) continue;
      found.push({
        words: node.data.trim().slice(0, 60),
        box: box(rect),
        contrast: behind ? contrast(color, behind) : 0,
        scrolls: owner.closest(".scroll") !== null,
      });
    }
  }
  return found;
}

// Returns pairs of text lines that overlap. A line's box is taller than its letters, so a quarter may overlap.
function overlaps(lines) {
  const sorted = [...lines].sort((a, b) => a.box[1] - b.box[1]);
  const found = [];
  for (let i = 0; i < sorted.length; i++) {
    const [left, top, right, bottom] = sorted[i].box;
    const slack = (bottom - top) / 4;
    for (let j = i + 1; j < sorted.length && sorted[j].box[1] < bottom - slack; j++) {
      const other = sorted[j].box;
      if (Math.min(right, other[2]) - Math.max(left, other[0]) > 0.5) found.push([sorted[i].words, sorted[j].words]);
    }
  }
  return found;
}

function measure(frame) {
  const page = frame.contentDocument;
  const view = frame.contentWindow;
  const lines = texts(page, view);
  const boxes = (selector) => [...page.querySelectorAll(selector)].map((each) => box(each.getBoundingClientRect()));
  return {
    title: page.title,
    width: page.documentElement.clientWidth,
    needed: page.documentElement.scrollWidth,
    background: view.getComputedStyle(page.documentElement).backgroundColor,
    lines: lines.length,
    overlaps: overlaps(lines),
    outside: lines.filter((one) => !one.scrolls && (one.box[0] < 0 || one.box[2] > page.documentElement.clientWidth)),
    faint: lines.filter((one) => one.contrast < 4.5),
    figures: boxes("figure"),
    fields: [...page.querySelectorAll("svg.field")].map((each) => ({
      box: box(each.getBoundingClientRect()),
      curves: [...each.querySelectorAll("polyline.line, circle")].map((one) => box(one.getBoundingClientRect())),
    })),
    bars: [...page.querySelectorAll(".bar > svg")].map((each) => ({
      box: box(each.getBoundingClientRect()),
      fill: box(each.querySelector(".fill").getBoundingClientRect()),
    })),
  };
}

window.addEventListener("load", () => {
  const found = {};
  for (const frame of document.querySelectorAll("iframe")) found[frame.title] = measure(frame);
  document.getElementById("found").textContent = JSON.stringify(found).replaceAll("<", "\\u003c");
});

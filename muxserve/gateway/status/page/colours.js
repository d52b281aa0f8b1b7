// One colour per model, wherever it is drawn. The same, in the same order, as in reports (metrics/colours.py).

export const COLOURS = [
  "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a63d2", "#d64550", "#7a9a2e", "#a0725a",
];

export function colour(models, name) {
  const index = models.indexOf(name);
  if (index < 0) return "#808890";
  return COLOURS[index % COLOURS.length];
}

const KEY = "muxserve-theme";
const media = matchMedia("(prefers-color-scheme: dark)");

export function applyTheme() {
  document.documentElement.dataset.theme = localStorage.getItem(KEY) || (media.matches ? "dark" : "light");
}

export function toggleTheme() {
  localStorage.setItem(KEY, document.documentElement.dataset.theme === "dark" ? "light" : "dark");
  applyTheme();
}

media.addEventListener("change", applyTheme);

export function theme() {
  const of = getComputedStyle(document.documentElement);
  return { line: of.getPropertyValue("--line"), text: of.getPropertyValue("--text"), dim: of.getPropertyValue("--dim") };
}

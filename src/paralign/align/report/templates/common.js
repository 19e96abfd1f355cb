"use strict";
// Shared by all pages: what needs a script is shown, the theme, and the key that filters.
for (const element of document.querySelectorAll(".needs-script")) element.hidden = false;

(() => {
  const button = document.getElementById("theme");
  const themes = ["system", "light", "dark"];
  const key = "paralign-theme";
  let theme = "system";
  try { theme = localStorage.getItem(key) || theme; } catch { /* storage is off: not kept */ }
  const apply = () => {
    if (theme === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    button.textContent = `Theme: ${theme}`;
  };
  button.addEventListener("click", () => {
    theme = themes[(themes.indexOf(theme) + 1) % themes.length];
    try { localStorage.setItem(key, theme); } catch { /* as above */ }
    apply();
  });
  apply();
})();

document.addEventListener("keydown", (event) => {
  const filter = document.getElementById("filter");
  const typing = event.target.closest("input:not([type=checkbox]), select");
  if (event.key !== "/" || typing || event.ctrlKey || event.metaKey || event.altKey || !filter) return;
  event.preventDefault();
  if (document.querySelector("dialog[open]")) document.querySelector("dialog[open]").close();
  filter.focus();
  filter.scrollIntoView({ block: "center" });
});

// Runs before anything is drawn, so that nothing flashes in the wrong colours.
(() => {
  try {
    const chosen = localStorage.getItem("theme");
    if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
  } catch {
    // A browser that keeps nothing has the colours of its system.
  }
})();

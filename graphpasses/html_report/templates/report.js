// Shows a tooltip for what the pointer is on.
const tip = document.getElementById("tip");
document.addEventListener("pointermove", (event) => {
  const marked = event.target.closest("[data-tip]");
  tip.hidden = !marked;
  if (!marked) return;
  tip.textContent = marked.dataset.tip;
  const { width, height } = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(0, Math.min(event.clientX + 14, innerWidth - width - 8))}px`;
  tip.style.top = `${event.clientY + 18 + height > innerHeight ? event.clientY - height - 10 : event.clientY + 18}px`;
});

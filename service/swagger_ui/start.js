// Opens the page's document. A file of its own, as the page's policy forbids scripts inside it.
const script = document.currentScript;

SwaggerUIBundle({
  url: script.dataset.openapi,
  dom_id: "#swagger-ui",
  deepLinking: true,
  layout: "BaseLayout",
  presets: [SwaggerUIBundle.presets.apis],
});

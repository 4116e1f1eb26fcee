/* The search of the site when its pages are opened as files: browsers refuse workers there, so this one lives in a hidden frame.
   Material for MkDocs would load the package iframe-worker from another host for this. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.appendChild(this.frame);
      const inside = this.frame.contentWindow;
      window.addEventListener("message", (event) => {
        if (event.source !== inside) return;
        const message = new MessageEvent("message", { data: event.data });
        this.dispatchEvent(message);
        if (this.onmessage) this.onmessage(message);
      });
      inside.document.open();
      inside.document.write(`<!doctype html><body><script>
        postMessage = (data) => parent.postMessage.call(parent, data, "*");
        importScripts = (...urls) => urls.reduce((before, url) => before.then(() => new Promise((done, failed) => {
          const script = document.createElement("script");
          script.src = url; script.onload = done; script.onerror = failed;
          document.body.appendChild(script);
        })), Promise.resolve());
      <\/script></body>`);
      inside.document.close();
      this.ready = inside.importScripts(new URL(url, document.baseURI).href);
    }
    postMessage(data) {
      const inside = this.frame.contentWindow;
      this.ready.then(() => inside.dispatchEvent(new MessageEvent("message", { data: structuredClone(data) })));
    }
    terminate() {
      this.frame.remove();
    }
  };
}

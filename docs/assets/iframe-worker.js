/* Search in pages that are opened from a folder: browsers start no worker there, so its script runs in a hidden frame. */
if (location.protocol === "file:") {
  const load = (page, url) =>
    new Promise((resolve, reject) => {
      const script = page.createElement("script");
      script.src = url;
      script.onload = resolve;
      script.onerror = reject;
      page.body.appendChild(script);
    });

  const message = (data) => new MessageEvent("message", { data: structuredClone(data) });

  // The search script looks for the second name.
  window.Worker = window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.appendChild(this.frame);
      this.inner = this.frame.contentWindow;
      const page = this.inner.document;
      page.open();
      page.write("<!doctype html><body></body>");
      page.close();
      this.inner.postMessage = (data) => this.dispatchEvent(message(data));
      this.inner.importScripts = (...urls) =>
        urls.reduce((done, each) => done.then(() => load(page, each)), Promise.resolve());
      this.ready = load(page, new URL(url, document.baseURI).href);
    }

    postMessage(data) {
      this.ready.then(() => this.inner.dispatchEvent(message(data)));
    }

    terminate() {
      this.frame.remove();
    }
  };
}

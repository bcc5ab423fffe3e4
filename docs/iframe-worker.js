// Search runs in a worker, which browsers refuse to a page that lies in a folder. There it runs in a frame of the page.
if (location.protocol === "file:") {
  window.Worker = class {
    constructor(url) {
      const frame = document.createElement("iframe");
      frame.hidden = true;
      const script = `<script src="${new URL(url, location.href)}"></` + "script>";
      frame.srcdoc = "<script>window.postMessage = (data) => parent.postMessage({ fromWorker: data }, '*')</" + "script>" + script;
      const loaded = new Promise((resolve) => frame.addEventListener("load", resolve));
      document.body.append(frame);
      this.frame = frame;
      this.postMessage = (data) =>
        loaded.then(() => frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })));
      this.heard = (event) => {
        if (event.source === frame.contentWindow && "fromWorker" in event.data) {
          const message = new MessageEvent("message", { data: event.data.fromWorker });
          this.onmessage?.(message);
        }
      };
      window.addEventListener("message", this.heard);
    }

    terminate() {
      window.removeEventListener("message", this.heard);
      this.frame.remove();
    }
  };
}

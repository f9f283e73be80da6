// Run the search worker in a hidden frame on pages opened from a folder.
//
// Browsers start no workers from file://. The theme's offline plugin loads a shim from another
// site unless a script with "iframe-worker" in its name is configured.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      this.inside = frame.contentWindow
      const page = this.inside.document
      page.open()
      page.write("<!doctype html><body></body>")
      page.close()
      this.inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }))
      const script = page.createElement("script")
      script.src = url
      this.ready = new Promise((resolve) => (script.onload = resolve))
      page.body.append(script)
    }

    postMessage(message) {
      const data = structuredClone(message)
      this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })))
    }
  }
}

package main

import (
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"time"

	"devlet.test/interop/kubernetes/cluster"
	"devlet.test/interop/node"
)

// inCluster tests devlet with the files and the variables that a kubelet gives to a pod.
var inCluster = []scenario{{name: "in-cluster", run: runInCluster, alone: true}}

// tokenRereading is more than the time after which devlet reads the token again.
const tokenRereading = 70 * time.Second

// runInCluster runs devlet as the DaemonSet of packaging/kubernetes does, and replaces its token.
func runInCluster(t *T) {
	driver, resource := t.name+".example.com", "example.com/"+t.name
	h := t.host()
	t.roles()
	t.class(driver, "")
	t.template("one", driver, 1)
	own, err := t.Admin.Create("/api/v1/namespaces/"+accountNamespace+"/pods", Object{
		"metadata": Object{"name": "devlet"},
		"spec": Object{
			"serviceAccountName": "devlet", "nodeName": h.name, "terminationGracePeriodSeconds": 0,
			"containers": []any{Object{"name": "devlet", "image": "none"}},
		},
	})
	t.ok(err)
	files := podFiles{t: t, dir: filepath.Join(t.dir, "serviceaccount")}
	first := files.renew(own)
	h.binary = files.program()
	h.start("--in-cluster", "--node-name", h.name, "--mode", "agent")
	plugin := h.plugin(resource, 2)
	t.Must("devlet publishes its devices with the token of its pod", h.counts(resource, "2", "2"))
	h.testDriver(driver)
	h.publish(driver, "device-0")
	t.create(pod{name: "first", host: h, template: "one"})
	t.Check("it admits a pod with a claim", h.awaitAdmitted(t.scheduled("first"), soon))
	view, err := h.kubernetes()
	t.Check("it is the ServiceAccount", errors.Join(err,
		equal("identity", view.Text("identity"), "system:serviceaccount:"+accountNamespace+":devlet")))

	second := files.renew(h.object())
	// The point of the test: the token is read again before the earlier one is invalid.
	time.Sleep(tokenRereading)
	t.ok(t.Admin.Delete("/api/v1/namespaces/"+accountNamespace+"/pods/devlet", 0))
	t.Must("the earlier token is invalid", t.awaitInvalid(first))
	t.ok(plugin.command("health device-1 Unhealthy"))
	t.Check("devlet publishes its devices with a token of the node", h.counts(resource, "2", "1"))
	var rejected error
	if strings.Contains(h.Log(), "Unauthorized") {
		rejected = errors.New("its log has Unauthorized")
	}
	t.Check("no call was rejected", rejected)

	t.ok(t.Admin.Delete("/api/v1/namespaces/"+accountNamespace+"/serviceaccounts/devlet", -1))
	t.Must("the next token is invalid, too", t.awaitInvalid(second))
	t.ok(plugin.command("health device-1 Healthy"))
	t.Check("devlet reports that", h.awaitError("node-status", "Unauthorized", soon))
	t.roles()
	files.renew(h.object())
	t.Check("and works with another token", h.counts(resource, "2", "2"))
}

// awaitInvalid waits until the API server rejects a user's token.
func (t *T) awaitInvalid(user cluster.User) error {
	api, err := t.Client(user)
	t.ok(err)
	return node.Until(soon, func() error {
		_, err := api.Get("/version")
		if !cluster.IsCode(err, 401) {
			return fmt.Errorf("the API server answers with %v", err)
		}
		return nil
	})
}

// podFiles is the volume of a pod with the token of its ServiceAccount.
type podFiles struct {
	t   *T
	dir string
}

// renew replaces the files by those with a new token, bound to an object. Like a kubelet, it replaces a link, so that all
// files change at once. It returns the user.
func (f podFiles) renew(bound Object) cluster.User {
	user, err := f.t.ServiceAccountToken(accountNamespace, "devlet", time.Hour, bound)
	f.t.ok(err)
	content := fmt.Sprintf("..%d", time.Now().UnixNano())
	f.t.ok(os.MkdirAll(filepath.Join(f.dir, content), 0o755))
	for name, source := range map[string]string{"token": user.Token, "ca.crt": f.t.Authority.File} {
		text, err := os.ReadFile(source)
		f.t.ok(err)
		f.t.ok(os.WriteFile(filepath.Join(f.dir, content, name), text, 0o600))
	}
	f.t.ok(os.WriteFile(filepath.Join(f.dir, content, "namespace"), []byte(accountNamespace), 0o600))
	earlier, _ := os.Readlink(filepath.Join(f.dir, "..data"))
	f.t.ok(os.Symlink(content, filepath.Join(f.dir, "..new")))
	f.t.ok(os.Rename(filepath.Join(f.dir, "..new"), filepath.Join(f.dir, "..data")))
	if earlier != "" {
		f.t.ok(os.RemoveAll(filepath.Join(f.dir, earlier)))
		return user
	}
	for _, name := range []string{"token", "ca.crt", "namespace"} {
		f.t.ok(os.Symlink(filepath.Join("..data", name), filepath.Join(f.dir, name)))
	}
	return user
}

// program writes a script that runs devlet with the files in a mount namespace of its own, and returns its path.
func (f podFiles) program() string {
	server, err := url.Parse(f.t.Server)
	f.t.ok(err)
	path := f.t.write("devlet-in-pod", fmt.Appendf(nil, `#!/bin/sh
export KUBERNETES_SERVICE_HOST=%s KUBERNETES_SERVICE_PORT=%s
exec unshare --mount --propagation private sh -ec '
  mount -t tmpfs tmpfs /var/run
  mkdir -p /var/run/secrets/kubernetes.io/serviceaccount
  mount --bind "$1" /var/run/secrets/kubernetes.io/serviceaccount
  shift
  exec "$@"
' sh %s %s "$@"
`, server.Hostname(), server.Port(), f.dir, *devlet))
	f.t.ok(os.Chmod(path, 0o700))
	return path
}

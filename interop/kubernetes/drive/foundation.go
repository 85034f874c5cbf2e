package main

import (
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"time"

	"devlet.test/interop/kubernetes/cluster"
	"devlet.test/interop/node"
)

// foundation needs no connection of devlet to the API server.
var foundation = []scenario{
	{name: "control-plane", run: controlPlane},
	{name: "restored-etcd", run: restoredEtcd, alone: true},
	{name: "example-driver", run: exampleDriver},
}

func controlPlane(t *T) {
	h := t.host()
	object := h.object()
	t.Check("the node has no taints", equal("taints", object.At("spec", "taints"), nil))
	t.class("devices.example.com", "")
	_, err := h.api.Get(nodePath(h.name))
	t.Check("the node may read its object", err)
	_, err = h.api.Get("/api/v1/pods")
	t.Check("the node may not list all pods", forbidden(err))

	t.create(pod{name: "plain", host: h})
	bound := t.scheduled("plain")
	t.Check("the pod is on its node", equal("node", bound.Text("spec", "nodeName"), h.name))
	t.ok(t.Admin.Delete(t.path("pods", "plain"), 0))
	t.Check("a pod is deleted", t.Admin.AwaitGone(t.path("pods", "plain"), bound.UID(), soon))

	account, err := t.ServiceAccountToken("kube-system", "default", time.Hour, object)
	t.ok(err)
	reader, err := t.Client(account)
	t.ok(err)
	identity, err := reader.Create("/apis/authentication.k8s.io/v1/selfsubjectreviews",
		Object{"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"})
	t.ok(err)
	t.Check("a token is bound to the node", equal("node of the token",
		identity.At("status", "userInfo", "extra", "authentication.kubernetes.io/node-name"), []any{h.name}))
	t.ok(t.Admin.Delete(nodePath(h.name), -1))
	h.createObject()
	t.Check("the token is invalid for another node of this name", node.Until(soon, func() error {
		_, err := reader.Get("/version")
		if !cluster.IsCode(err, 401) {
			return fmt.Errorf("the API server answers with %v", err)
		}
		return nil
	}))
}

// restoredEtcd tests the control plane itself: killed, paused, and restored to an older revision.
func restoredEtcd(t *T) {
	h := t.host()
	t.create(pod{name: "before", host: h, bound: true})
	snapshot := filepath.Join(t.dir, "snapshot")
	t.Must("etcd is copied", t.Snapshot(snapshot))
	after := t.create(pod{name: "after", host: h, bound: true})
	for i := range 300 {
		var err error
		after, err = t.Admin.Patch(t.path("pods", "after"), Object{"metadata": Object{"annotations": Object{"n": fmt.Sprint(i)}}})
		t.ok(err)
	}
	t.Must("the API server is killed and starts again", t.Restart())
	_, err := t.Admin.Get(t.path("pods", "after"))
	t.Must("the pod is still there", err)

	t.Must("etcd is restored", t.Restore(snapshot))
	_, err = t.Admin.Get(t.path("pods", "before"))
	t.Check("a pod of the snapshot is there", err)
	_, err = t.Admin.Get(t.path("pods", "after"))
	t.Check("a newer pod is not", refused(err, "404"))
	now := t.create(pod{name: "now", host: h, bound: true})
	var behind error
	if revision(now) >= revision(after) {
		behind = fmt.Errorf("%d was followed by %d", revision(after), revision(now))
	}
	t.Check("new objects have lower resource versions than lost ones", behind)
}

// exampleDriver is the whole flow with an unmodified driver, as a program without access to the API server would do it.
func exampleDriver(t *T) {
	const driver = "example-driver.example.com"
	h := t.host()
	t.class(driver, "")
	t.template("one", driver, 1)
	h.start()
	process := h.exampleDriver(driver, 2)
	t.Must("the driver publishes its devices", errors.Join(h.awaitSlices(driver, 2, soon), process.Running()))
	t.Must("the driver registers with devlet", node.Until(soon, func() error { return h.serving(driver) }))

	t.create(pod{name: "first", host: h, template: "one"})
	bound := t.scheduled("first")
	claim, err := t.Admin.Get(t.path("resourceclaims", t.claimOf(bound)))
	t.Must("the claim of the pod exists", err)
	results := claim.Object("status", "allocation", "devices").Objects("results")
	t.Must("the scheduler allocates one device", equal("devices", len(results), 1))
	t.Check("the claim is reserved for the pod",
		equal("consumers", claim.Objects("status", "reservedFor")[0].Text("uid"), bound.UID()))

	list, err := t.Kubectl("", "get", "pods,resourceclaims", "-n", t.name, "-o", "yaml")
	t.Must("kubectl prints pod and claim as a List", err)
	admitted, err := h.AdmitFiles(t.write("list.yaml", list))
	t.Must("devlet admits the pod", err)
	t.Check("its claim is that of the API server", equal("claim", admitted.Claims[0].UID, claim.UID()))

	device := results[0].Text("device")
	options, err := h.options("first")
	t.Must("devlet prints options", err)
	t.Check("they have the CDI devices of the driver", cdiDevices(options.CDIDevices, claim.UID(), device))
	specs := filepath.Join(h.cdi(), "*"+claim.UID()+"*")
	t.Check("the driver has written the CDI spec", files(specs, 1))

	_, err = h.Run("remove", t.name+"/first")
	t.Check("the pod is removed", err)
	t.Check("the driver has unprepared the claim", files(specs, 0))
	t.ok(t.Admin.Delete(t.path("pods", "first"), 0))
	t.Check("the claim is deleted", t.Admin.AwaitGone(t.path("resourceclaims", claim.Name()), claim.UID(), soon))
	t.Check("the driver stops", process.Stop())
	t.Check("devlet stops", h.Stop())
	h.Node = nil
}

// cdiDevices checks that one of the names is that of a claim's device.
func cdiDevices(names []string, claim, device string) error {
	for _, name := range names {
		if strings.Contains(name, claim) && strings.HasSuffix(name, device) {
			return nil
		}
	}
	return fmt.Errorf("%v has no device %s of claim %s", names, device, claim)
}

// files checks the number of files that match a pattern.
func files(pattern string, count int) error {
	found, err := filepath.Glob(pattern)
	if err != nil {
		return err
	}
	return equal("files "+filepath.Base(pattern), len(found), count)
}

func forbidden(err error) error {
	if !cluster.IsCode(err, 403) {
		return fmt.Errorf("the API server answers with %v", err)
	}
	return nil
}

package main

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"slices"
	"strings"
	"sync/atomic"
	"time"
)

// nodes tests the counts that devlet publishes in the status of the Node.
var nodes = []scenario{
	{name: "node-counts", run: nodeCounts},
	{name: "node-counts-reset", run: nodeCountsReset},
	{name: "node-created-again", run: nodeCreatedAgain},
	{name: "node-renamed", run: nodeRenamed, alone: true},
	{name: "node-many-devices", run: nodeManyDevices},
	{name: "node-resource-removed", run: nodeResourceRemoved, long: true},
}

// counts waits for the published counts of a resource; "" is a missing key.
func (h *host) counts(resource, capacity, allocatable string) error {
	_, err := h.t.Admin.Await(nodePath(h.name), late, func(o Object) error {
		return errors.Join(
			equal("capacity", o.Text("status", "capacity", resource), capacity),
			equal("allocatable", o.Text("status", "allocatable", resource), allocatable))
	})
	if err != nil {
		err = fmt.Errorf("%w; %s", err, h.status())
	}
	return err
}

func nodeCounts(t *T) {
	const resource, other = "example.com/counted", "example.com/other"
	h := t.host()
	h.serve()
	plugin := h.plugin(resource, 4)
	t.Must("capacity and allocatable are published", h.counts(resource, "4", "4"))
	t.ok(plugin.command("health device-1 Unhealthy"))
	t.Check("an unhealthy device is not allocatable", h.counts(resource, "4", "3"))
	t.ok(plugin.command(`list [{"id":"device-0"}]`))
	t.Check("removed devices are not counted", h.counts(resource, "1", "1"))
	h.plugin(other, 2)
	t.Check("another resource is added", errors.Join(h.counts(other, "2", "2"), h.counts(resource, "1", "1")))
	plugin.stop()
	t.Check("without its plugin, no device is allocatable", h.counts(resource, "1", "0"))
	t.Check("the node keeps its other resources", equal("cpu", h.object().Text("status", "allocatable", "cpu"), "64"))
}

// nodeCountsReset has another writer change the counts, as a kubelet does that registers.
func nodeCountsReset(t *T) {
	const resource = "example.com/reset"
	h := t.host()
	h.serve()
	h.plugin(resource, 4)
	t.Must("the counts are published", h.counts(resource, "4", "4"))
	for _, value := range []any{"0", "7", nil} {
		_, err := t.Admin.Patch(nodePath(h.name)+"/status", Object{"status": Object{
			"capacity": Object{resource: value}, "allocatable": Object{resource: value},
		}})
		t.ok(err)
		t.Check(fmt.Sprintf("another writer sets %v, and devlet corrects it", value), h.counts(resource, "4", "4"))
	}
	t.Check("devlet logs the conflict with the other writer",
		equal("logged", strings.Contains(h.Log(), "changed by another writer"), true))
}

// gracePeriod is the time for which a resource without a plugin is published.
const gracePeriod = 5 * time.Minute

// nodeResourceRemoved stops a plugin for longer than the grace period.
func nodeResourceRemoved(t *T) {
	const resource, other = "example.com/removed", "example.com/stays"
	h := t.host()
	h.serve()
	plugin := h.plugin(resource, 2)
	h.plugin(other, 1)
	t.Must("two resources are published", errors.Join(h.counts(resource, "2", "2"), h.counts(other, "1", "1")))
	plugin.stop()
	stopped := time.Now()
	t.Check("without its plugin, no device is allocatable", h.counts(resource, "2", "0"))

	// The point of the test: the grace period ends.
	time.Sleep(time.Until(stopped.Add(gracePeriod - 5*time.Second)))
	t.Check("5 s before the end of the grace period, it is published", equal("capacity and allocatable", h.published(resource), "2 0"))
	t.Must("then the resource is removed", h.counts(resource, "", ""))
	t.Check("at the end of the grace period", between(time.Since(stopped), gracePeriod, gracePeriod+15*time.Second))
	t.Check("the other resource stays", equal("capacity and allocatable", h.published(other), "1 1"))
	h.plugin(resource, 3)
	t.Must("a plugin returns, and it is published again", h.counts(resource, "3", "3"))
	_, err := t.Admin.Patch(nodePath(h.name)+"/status", Object{"status": Object{
		"capacity": Object{resource: nil}, "allocatable": Object{resource: nil},
	}})
	t.ok(err)
	t.Check("another writer removes it, and devlet corrects that", h.counts(resource, "3", "3"))
}

// published returns the published counts of a resource, as of now.
func (h *host) published(resource string) string {
	object := h.object()
	return object.Text("status", "capacity", resource) + " " + object.Text("status", "allocatable", resource)
}

func nodeCreatedAgain(t *T) {
	const resource = "example.com/again"
	h := t.host()
	h.serve()
	h.plugin(resource, 4)
	t.Must("the counts are published", h.counts(resource, "4", "4"))
	t.ok(t.Admin.Delete(nodePath(h.name), -1))
	const missing = "no Node object"
	t.Check("devlet reports that it does not exist", h.awaitProblem(missing, true))
	h.createObject()
	t.Check("they are published in the new object", h.counts(resource, "4", "4"))
	t.Check("the problem has ended", h.awaitProblem(missing, false))
	bound := t.create(pod{name: "first", host: h, limits: Object{resource: "1"}})
	t.scheduled("first")
	t.Check("and its pods are admitted", h.awaitAdmitted(bound, soon))
}

// nodeManyDevices has a count that the API server prints as 11k. devlet must not write it again and again.
func nodeManyDevices(t *T) {
	const resource, other = "example.com/many", "example.com/few"
	h := t.host()
	h.serve()
	h.peer(Object{"root": h.root, "resource": resource, "many": 11_000})
	t.Must("11,000 devices are published", h.counts(resource, "11k", "11k"))

	var changes atomic.Int32
	version := h.object().Text("metadata", "resourceVersion")
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		query := url.Values{"fieldSelector": {"metadata.name=" + h.name}, "resourceVersion": {version}}
		t.Admin.Watch(ctx, "/api/v1/nodes", query, func(_ string, o Object) bool {
			changes.Add(1)
			return o.Text("metadata", "labels", "end") == ""
		})
	}()
	h.plugin(other, 2)
	t.Must("another resource is published", h.counts(other, "2", "2"))
	_, err := t.Admin.Patch(nodePath(h.name), Object{"metadata": Object{"labels": Object{"end": "true"}}})
	t.ok(err)
	select {
	case <-ended:
	case <-time.After(soon):
		t.Must("the watch ends", errors.New("it does not"))
	}
	// One for the empty list of the new resource at most, one for its devices, and the label.
	if seen := changes.Load(); seen > 3 {
		t.Check("each change is written once", fmt.Errorf("%d changes", seen))
	} else {
		t.Check("each change is written once", nil)
	}
}

// nodeRenamed starts devlet with the name of another node by mistake. For a ServiceAccount, the list of its pods is empty.
func nodeRenamed(t *T) {
	h := t.host()
	resource := "example.com/" + t.name
	h.serveAs(h.account())
	h.plugin(resource, 1)
	first := t.create(pod{name: "first", host: h, bound: true, limits: Object{resource: "1"}})
	t.Must("devlet admits a pod", h.awaitAdmitted(first, soon))
	t.Must("devlet has listed the pods", h.awaitReconciler("pods"))
	h.Kill()
	flags := h.flags
	h.flags = slices.Clone(flags)
	h.flags[slices.Index(flags, "--node-name")+1] = "another"
	t.Must("devlet starts with another name", h.restart())
	t.Check("devlet reports it", h.awaitProblem("the pods on record are those of Node "+h.name, true))
	t.Check("and keeps the pod", h.awaitAdmitted(first, soon))
	h.Kill()
	h.flags = flags
	t.Must("devlet starts with the right name", h.restart())
	t.ok(t.Admin.Delete(t.path("pods", "first"), 0))
	t.Check("devlet removes the pod once it is deleted", h.awaitRemoved(first, soon))
	t.Check("no problem is left", h.awaitProblem("the pods on record", false))
}

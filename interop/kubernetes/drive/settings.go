package main

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"strings"
	"sync/atomic"
	"time"

	"devlet.test/interop/kubernetes/cluster"
	"devlet.test/interop/node"
)

// settings tests the keys of the configuration below `kubernetes`.
var settings = []scenario{
	{name: "mode-observe", run: modeObserve},
	{name: "heartbeat", run: heartbeat},
	{name: "beside-kubelet", run: besideKubelet},
	{name: "unhealthy-evicted", run: func(t *T) { removeUnhealthy(t, "evict") }},
	{name: "unhealthy-deleted", run: func(t *T) { removeUnhealthy(t, "delete") }},
	{name: "unhealthy-not-evicted", run: unhealthyNotEvicted},
	{name: "driver-abandoned-after-time", run: driverAbandonedAfterTime},
	{name: "driver-abandoned-by-annotation", run: driverAbandonedByAnnotation},
	{name: "slices-wiped-at-start", run: slicesWipedAtStart},
}

// config writes settings below `kubernetes` and returns the flags for them.
func (t *T) config(text string) []string {
	return []string{"--config", t.write("config.yaml", []byte("kubernetes: {"+text+"}\n"))}
}

func modeObserve(t *T) {
	driver, resource := t.name+".example.com", "example.com/"+t.name
	h := t.host()
	t.class(driver, "")
	t.template("one", driver, 1)
	h.start("--kubeconfig", h.kubeconfig, "--node-name", h.name, "--mode", "observe")
	h.testDriver(driver)
	h.plugin(resource, 1)
	h.publish(driver, "device-0")
	before := h.object().At("status", "capacity")
	t.create(pod{name: "first", host: h, template: "one"})
	bound := t.scheduled("first")
	manifest, err := t.Kubectl("", "get", "pod", "first", "-n", t.name, "-o", "yaml")
	t.ok(err)
	t.Check("devlet lists the slices", node.Until(soon, func() error {
		listed, err := h.listedSlices()
		return errors.Join(err, equal("slices", len(listed), 1))
	}))
	pods, err := h.admitted()
	t.Check("no pod is admitted by itself", errors.Join(err, equal("pods", len(pods), 0)))
	admitted, err := h.AdmitFiles(t.write("pod.yaml", manifest))
	t.Must("devlet looks up the claim of an admission", err)
	t.Check("and prepares it", equal("claims", len(admitted.Claims), 1))
	t.ok(t.Admin.Delete(t.path("pods", "first"), 0))
	t.ok(t.Admin.AwaitGone(t.path("pods", "first"), bound.UID(), soon))
	h.Kill()
	t.Must("devlet starts again", h.restart())
	t.Check("the pod stays until it is removed by hand", h.awaitAdmitted(bound, soon))
	t.Check("the Node is not changed", equal("capacity", h.object().At("status", "capacity"), before))
}

// heartbeat has devlet create and renew the Node.
func heartbeat(t *T) {
	h := t.hostNamed(t.name)
	t.ok(t.Admin.Delete(nodePath(h.name), -1))
	h.serve(t.config("heartbeat: true")...)
	ready := func(o Object) error {
		for _, condition := range o.Objects("status", "conditions") {
			if condition.Text("type") == "Ready" {
				return equal("Ready", condition.Text("status"), "True")
			}
		}
		return errors.New("it has no condition Ready")
	}
	_, err := t.Admin.Await(nodePath(h.name), soon, ready)
	t.Must("devlet creates the Node, and it is ready", err)
	first, err := t.Admin.Await(leaseCollection+"/"+h.name, soon, cluster.Exists)
	t.Must("it has a lease", err)
	_, err = t.Admin.Await(leaseCollection+"/"+h.name, late, func(o Object) error {
		if o.Text("spec", "renewTime") == first.Text("spec", "renewTime") {
			return errors.New("it is not renewed")
		}
		return nil
	})
	t.Check("devlet renews the lease", err)
	t.Check("changes of the Node do not renew it more often", h.renewals(50, 5))
	t.ok(t.Admin.Delete(nodePath(h.name), -1))
	_, err = t.Admin.Await(nodePath(h.name), late, ready)
	t.Check("devlet creates the Node again", err)
}

// renewals changes the Node a number of times. It returns an error if its lease is renewed more often than a limit.
func (h *host) renewals(changes int, limit int32) error {
	var renewals atomic.Int32
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		h.t.Admin.Watch(ctx, leaseCollection, url.Values{"fieldSelector": {"metadata.name=" + h.name}},
			func(string, Object) bool { renewals.Add(1); return true })
	}()
	for i := range changes {
		_, err := h.t.Admin.Patch(nodePath(h.name), Object{"metadata": Object{"labels": Object{"n": fmt.Sprint(i)}}})
		h.t.ok(err)
		time.Sleep(20 * time.Millisecond)
	}
	cancel()
	<-ended
	if count := renewals.Load(); count > limit {
		return fmt.Errorf("%d renewals for %d changes", count, changes)
	}
	return nil
}

// besideKubelet publishes what survives a kubelet, which sets allocatable to capacity.
func besideKubelet(t *T) {
	resource := "example.com/" + t.name
	h := t.host()
	h.serve(t.config("besideKubelet: true")...)
	plugin := h.plugin(resource, 4)
	t.Must("the counts are published", h.counts(resource, "4", "4"))
	early := t.create(pod{name: "early", host: h, bound: true, limits: Object{resource + "-late": "1"}})
	first := t.create(pod{name: "first", host: h, bound: true, limits: Object{resource: "4"}})
	t.Must("devlet admits a pod", h.awaitAdmitted(first, soon))
	listed, err := h.listed()
	t.Check("an earlier one, of a resource without a plugin, is the kubelet's",
		errors.Join(err, equal("listed", listed[early.UID()].UID, "")))
	h.plugin(resource+"-late", 1)
	t.Check("it is devlet's when a plugin registers", h.awaitAdmitted(early, soon))
	t.run(first)
	t.ok(t.Admin.Delete(t.path("pods", "first"), 0))
	t.Must("devlet removes it", h.awaitRemoved(first, soon))
	t.ok(plugin.command("health device-1 Unhealthy"))
	t.Check("capacity has healthy devices only", h.counts(resource, "3", "3"))
	t.ok(plugin.command("health device-1 Healthy"))
	t.ok(h.counts(resource, "4", "4"))
	second := t.create(pod{name: "second", host: h, bound: true, limits: Object{resource: "4"}})
	t.Must("devlet admits another pod", h.awaitAdmitted(second, soon))
	t.run(second)
	t.ok(plugin.command("health device-1 Unhealthy"))
	t.Check("its unhealthy device is a condition", t.awaitCondition("second", "devlet.dev/DevicesHealthy", "False"))
	pod, err := t.Admin.Get(t.path("pods", "second"))
	t.ok(err)
	t.Check("the status of the container is the kubelet's", equal("allocatedResourcesStatus",
		pod.Objects("status", "containerStatuses")[0].At("allocatedResourcesStatus"), nil))
	t.Check("held devices stay in the counts", h.counts(resource, "4", "4"))
}

// awaitCondition waits for a pod's condition.
func (t *T) awaitCondition(pod, kind, status string) error {
	_, err := t.Admin.Await(t.path("pods", pod), soon, func(o Object) error {
		for _, condition := range o.Objects("status", "conditions") {
			if condition.Text("type") == kind {
				return equal(kind, condition.Text("status"), status)
			}
		}
		return fmt.Errorf("it has no %s: %v", kind, o.At("status", "conditions"))
	})
	return err
}

// removeUnhealthy has devlet remove pods with an unhealthy device.
func removeUnhealthy(t *T, action string) {
	resource, other := "example.com/"+t.name, "example.com/other"
	h := t.host()
	h.serve(t.config(fmt.Sprintf("onUnhealthy: {%s: %s}", resource, action))...)
	plugin, spared := h.plugin(resource, 1), h.plugin(other, 1)
	first := t.create(pod{name: "first", host: h, bound: true, limits: Object{resource: "1"}})
	second := t.create(pod{name: "second", host: h, bound: true, limits: Object{other: "1"}})
	t.Must("devlet admits two pods", errors.Join(h.awaitAdmitted(first, soon), h.awaitAdmitted(second, soon)))
	t.run(first)
	t.run(second)
	t.ok(spared.command("health device-0 Unhealthy"))
	t.Must("the health of the other resource is reported", t.awaitHealth("second", other, "device-0", "Unhealthy"))
	t.ok(plugin.command("health device-0 Unhealthy"))
	t.Must("the health of its device is reported", t.awaitHealth("first", resource, "device-0", "Unhealthy"))
	t.ok(plugin.command("health device-0 Healthy"))
	t.Must("and that it is healthy again", t.awaitHealth("first", resource, "device-0", "Healthy"))
	t.ok(plugin.command("health device-0 Unhealthy"))
	began := time.Now()
	t.Check("the pod is removed", t.Admin.AwaitGone(t.path("pods", "first"), first.UID(), soon))
	t.Check("once its device has stayed unhealthy for 10 s", between(time.Since(began), 10*time.Second, soon))
	t.Check("and its device is released", h.awaitRemoved(first, soon))
	left, err := t.Admin.Get(t.path("pods", "second"))
	t.Check("the pod of the other resource stays",
		errors.Join(err, equal("deletion", left.At("metadata", "deletionTimestamp"), nil)))
}

// unhealthyNotEvicted has a disruption budget that refuses an eviction: the health of other pods is reported all the same.
func unhealthyNotEvicted(t *T) {
	resource, other := "example.com/"+t.name, "example.com/other"
	h := t.host()
	h.serve(t.config(fmt.Sprintf("onUnhealthy: {%s: evict}", resource))...)
	plugin, flapping := h.plugin(resource, 1), h.plugin(other, 1)
	first := t.create(pod{name: "first", host: h, bound: true, limits: Object{resource: "1"}})
	second := t.create(pod{name: "second", host: h, bound: true, limits: Object{other: "1"}})
	t.Must("devlet admits two pods", errors.Join(h.awaitAdmitted(first, soon), h.awaitAdmitted(second, soon)))
	_, err := t.Admin.Patch(t.path("pods", "first"), Object{"metadata": Object{"labels": Object{"app": "first"}}})
	t.ok(err)
	t.run(first)
	t.run(second)
	budgets := "/apis/policy/v1/namespaces/" + t.name + "/poddisruptionbudgets"
	_, err = t.Admin.Create(budgets, Object{"metadata": Object{"name": "none"}, "spec": Object{
		"maxUnavailable": 0, "selector": Object{"matchLabels": Object{"app": "first"}},
	}})
	t.ok(err)
	t.ok(plugin.command("health device-0 Unhealthy"))
	t.Check("an event says that the pod is not evicted", t.Admin.AwaitList(t.path("events"),
		url.Values{"fieldSelector": {"involvedObject.uid=" + first.UID() + ",reason=FailedEviction"}}, late,
		func(events []Object) error { return equal("some events", len(events) > 0, true) }))
	for i, health := range []string{"Unhealthy", "Healthy", "Unhealthy"} {
		changed := time.Now()
		t.ok(flapping.command("health device-0 " + health))
		t.Check(fmt.Sprintf("the health of another pod is reported, change %d", i), t.awaitHealth("second", other, "device-0", health))
		t.Check("within 3 s", between(time.Since(changed), 0, 3*time.Second))
	}
	t.Check("no reconciler fails", equal(h.status(), strings.Contains(h.status(), " ("), false))
	t.ok(t.Admin.Delete(budgets+"/none", -1))
	t.Check("without the budget, the pod is evicted", t.Admin.AwaitGone(t.path("pods", "first"), first.UID(), late))
}

func driverAbandonedAfterTime(t *T) {
	s := newScene(t, t.config(fmt.Sprintf("abandonAfter: {%s.example.com: 2s}", t.name))...)
	first := s.pod("first")
	t.Must("devlet admits a pod", s.h.awaitAdmitted(first, soon))
	claim := s.claimUID(first)
	s.peer.kill()
	t.ok(t.Admin.Delete(t.path("pods", "first"), 0))
	t.Check("devlet stops waiting for the driver", s.h.awaitAbandoned(claim))
	t.Check("and removes the pod", s.h.awaitRemoved(first, soon))
	s.peer = s.h.testDriver(s.driver)
	t.Check("the driver returns and unprepares the claim", s.peer.awaitAsked("NodeUnprepareResources", claim))
	t.Check("no claim is left", s.h.claimCount(0, soon))
}

// driverAbandonedByAnnotation ends the wait for one pod that is stuck terminating.
func driverAbandonedByAnnotation(t *T) {
	s := newScene(t, t.config("finalDelete: true")...)
	first := s.pod("first")
	t.Must("devlet admits a pod", s.h.awaitAdmitted(first, soon))
	claim := s.claimUID(first)
	t.run(first)
	s.peer.kill()
	t.ok(t.Admin.Delete(t.path("pods", "first"), 300))
	t.end(first)
	t.Must("its claim waits for the driver", s.h.awaitReleased(first))
	_, err := t.Admin.Patch(t.path("pods", "first"), Object{
		"metadata": Object{"annotations": Object{"devlet.dev/abandon-driver": s.driver}},
	})
	t.ok(err)
	t.Check("devlet stops waiting for the driver", s.h.awaitAbandoned(claim))
	t.Check("and deletes the object", t.Admin.AwaitGone(t.path("pods", "first"), first.UID(), soon))
}

// slicesWipedAtStart deletes all slices at the start, as a kubelet does.
func slicesWipedAtStart(t *T) {
	const driver, live = "wiped.example.com", "live.example.com"
	h := t.host()
	h.publish(driver, "device-0")
	h.publish(live, "device-0")
	// Slices from before the start are older than one second.
	time.Sleep(2 * time.Second)
	accept := t.reject(h, `{verbs: [list, deletecollection], apiGroups: [resource.k8s.io], resources: [resourceslices], clusterScope: true}`,
		sliceCollection+"?"+h.sliceQuery(live).Encode())
	started := time.Now()
	h.serve(t.config("slices: {wipeAtStart: all}")...)
	h.testDriver(live)
	t.Must("a driver registers", node.Until(soon, func() error { return h.serving(live) }))
	t.Must("devlet cannot list or delete slices", h.awaitError("slices", "Too many requests", soon))
	h.publish(live, "device-1")
	accept()
	wiped, err := h.awaitWiped(driver, soon)
	t.Must("slices without a driver are deleted", err)
	t.Check("at once", between(wiped.Sub(started), 0, wipeDelay))
	t.Check("of the connected driver, the one that it has published since is left",
		t.Admin.AwaitList(sliceCollection, h.sliceQuery(live), soon, func(list []Object) error {
			var devices []string
			for _, slice := range list {
				devices = append(devices, slice.Objects("spec", "devices")[0].Text("name"))
			}
			return equal("devices", devices, []string{"device-1"})
		}))
}

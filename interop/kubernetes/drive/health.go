package main

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"strings"
	"sync/atomic"
)

// health tests that the health of devices reaches the status of pods, and that tainted devices are freed.
var health = []scenario{
	{name: "health-of-device-plugin", run: healthOfDevicePlugin},
	{name: "health-of-claim", run: healthOfClaim},
	{name: "health-flapping", run: healthFlapping},
	{name: "device-tainted", run: deviceTainted},
}

// awaitHealth waits for the health of the only device of a pod's container.
func (t *T) awaitHealth(pod, resource, id, health string) error {
	_, err := t.Admin.Await(t.path("pods", pod), soon, func(o Object) error {
		for _, container := range o.Objects("status", "containerStatuses") {
			for _, status := range container.Objects("allocatedResourcesStatus") {
				for _, device := range status.Objects("resources") {
					found := strings.HasPrefix(status.Text("name"), resource) && strings.Contains(device.Text("resourceID"), id)
					if found && device.Text("health") == health {
						return nil
					}
				}
			}
		}
		return fmt.Errorf("not %s: %v", health, o.At("status", "containerStatuses"))
	})
	return err
}

func healthOfDevicePlugin(t *T) {
	resource := "example.com/" + t.name
	h := t.host()
	h.serve()
	plugin := h.plugin(resource, 1)
	first := t.create(pod{name: "first", host: h, bound: true, limits: Object{resource: "1"}})
	t.Must("devlet admits a pod", h.awaitAdmitted(first, soon))
	t.run(first)
	t.Check("its device is reported as healthy", t.awaitHealth("first", resource, "device-0", "Healthy"))
	t.ok(plugin.command("health device-0 Unhealthy"))
	t.Check("its device is reported as unhealthy", t.awaitHealth("first", resource, "device-0", "Unhealthy"))
	t.ok(plugin.command("health device-0 Healthy"))
	t.Check("and as healthy again", t.awaitHealth("first", resource, "device-0", "Healthy"))
	status, err := t.Admin.Get(t.path("pods", "first"))
	t.Check("the rest of the status is kept", errors.Join(err, equal("phase", status.Text("status", "phase"), "Running"),
		equal("image", status.Objects("status", "containerStatuses")[0].Text("image"), "none")))
}

// Values of the protocol.
const healthy, unhealthy = 1, 2

// report sends the health of the only device of the driver.
func (s *scene) report(health int) error {
	return s.peer.command(fmt.Sprintf(`health [{"pool":%q,"device":"device-0","health":%d,"timeoutSeconds":600}]`,
		s.h.name, health))
}

func healthOfClaim(t *T) {
	s := newScene(t)
	first := s.pod("first")
	t.Must("devlet admits a pod", s.h.awaitAdmitted(first, soon))
	t.run(first)
	id := "devlet.test/device=" + s.claimUID(first)
	t.ok(s.report(unhealthy))
	t.Check("its device is reported as unhealthy", t.awaitHealth("first", "claim:device", id, "Unhealthy"))
	t.ok(s.report(healthy))
	t.Check("and as healthy again", t.awaitHealth("first", "claim:device", id, "Healthy"))
}

// healthFlapping changes the health of a device 100 times a second.
func healthFlapping(t *T) {
	const changes = 1000
	resource := "example.com/" + t.name
	h := t.host()
	h.serve()
	plugin := h.plugin(resource, 1)
	first := t.create(pod{name: "first", host: h, bound: true, limits: Object{resource: "1"}})
	t.Must("devlet admits a pod", h.awaitAdmitted(first, soon))
	t.run(first)
	t.Must("its device is reported as healthy", t.awaitHealth("first", resource, "device-0", "Healthy"))

	var writes atomic.Int32
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	go t.Admin.Watch(ctx, t.path("pods"), url.Values{"fieldSelector": {"metadata.name=first"}}, func(string, Object) bool {
		writes.Add(1)
		return true
	})
	t.ok(plugin.command("flood", fmt.Sprint(changes), "100"))
	t.ok(plugin.awaitEvent("flooded"))
	t.ok(plugin.command("health device-0 Unhealthy"))
	t.Check("the last state is reported", t.awaitHealth("first", resource, "device-0", "Unhealthy"))
	if count := writes.Load(); count > changes/10 {
		t.Check("changes are coalesced", fmt.Errorf("%d writes for %d changes", count, changes))
	} else {
		t.Check("changes are coalesced", nil)
	}
	t.ok(plugin.command("health device-0 Healthy"))
	t.Check("and the next one", t.awaitHealth("first", resource, "device-0", "Healthy"))
}

// deviceTainted has the control plane evict the pod of a tainted device.
func deviceTainted(t *T) {
	s := newScene(t)
	first := s.pod("first")
	t.Must("devlet admits a pod", s.h.awaitAdmitted(first, soon))
	claim := s.claimUID(first)
	rules, err := t.Admin.Collection("resource.k8s.io", "devicetaintrules")
	t.ok(err)
	_, err = t.Admin.Create(rules, Object{
		"metadata": Object{"name": t.name},
		"spec": Object{
			"deviceSelector": Object{"driver": s.driver, "pool": s.h.name, "device": "device-0"},
			"taint":          Object{"key": "test", "value": "broken", "effect": "NoExecute"},
		},
	})
	t.ok(err)
	t.cleanup(func() { t.Admin.Delete(rules+"/"+t.name, -1) })
	t.Must("the control plane evicts the pod", func() error {
		_, err := t.Admin.Await(t.path("pods", "first"), soon, func(o Object) error {
			if o != nil && o.Text("metadata", "deletionTimestamp") == "" {
				return errors.New("it is not deleted")
			}
			return nil
		})
		return err
	}())
	t.Check("devlet removes it", s.h.awaitRemoved(first, soon))
	t.Check("its claim is unprepared", s.peer.awaitAsked("NodeUnprepareResources", claim))
}

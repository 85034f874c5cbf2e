package main

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"devlet.test/interop/kubernetes/cluster"
	"devlet.test/interop/node"
)

// claims tests what devlet reads of ResourceClaims, and what it writes into their status.
var (
	claims = []scenario{
		{name: "claim-status-of-node", run: claimStatusOfNode},
		{name: "claim-waits", run: claimWaits},
	}
	accountClaims = []scenario{
		{name: "claim-status", run: claimStatus, alone: true},
		{name: "claim-status-without-right", run: claimStatusWithoutRight, alone: true},
	}
)

// Types of conditions of devices.
const preparedType, healthyType = "devlet.dev/Prepared", "devlet.dev/Healthy"

// shared creates a claim that outlives its pods, and a pod that uses it.
func (s *scene) shared(pod string) Object {
	s.claim("shared", s.driver, 1)
	return s.user(pod)
}

// user creates a pod of the shared claim, and waits until it is scheduled.
func (s *scene) user(name string) Object {
	s.create(pod{name: name, host: s.h, claim: "shared"})
	return s.scheduled(name)
}

// deviceCondition returns a condition of the only device of the shared claim.
func deviceCondition(claim Object, kind string) Object {
	for _, device := range claim.Objects("status", "devices") {
		for _, condition := range device.Objects("conditions") {
			if condition.Text("type") == kind {
				return condition
			}
		}
	}
	return nil
}

// awaitDevice waits for a condition of the shared claim's device.
func (s *scene) awaitDevice(kind, status string) (Object, error) {
	claim, err := s.Admin.Await(s.path("resourceclaims", "shared"), soon, func(o Object) error {
		return equal(kind, deviceCondition(o, kind).Text("status"), status)
	})
	if err != nil {
		err = fmt.Errorf("%w; %s", err, s.h.status())
	}
	return claim, err
}

// claimStatus writes as a ServiceAccount with a token of the node.
func claimStatus(t *T) {
	h := t.host()
	s := t.sceneOf(h, h.account())
	first := s.shared("first")
	t.Must("devlet admits a pod", h.awaitAdmitted(first, soon))
	claim, err := s.awaitDevice(preparedType, "True")
	t.Must("its device is reported as prepared", err)
	prepared := deviceCondition(claim, preparedType)
	t.Check("without a report, its health is not", equal("condition", deviceCondition(claim, healthyType), Object(nil)))

	// What a driver writes, as another writer of the same device.
	path := t.path("resourceclaims", "shared", "status")
	_, err = t.Admin.Call("PATCH", path+"?fieldManager=driver", cluster.ApplyPatch, Object{
		"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": Object{"name": "shared"},
		"status": Object{"devices": []any{Object{
			"driver": s.driver, "pool": h.name, "device": "device-0", "data": Object{"key": "value"},
			"networkData": Object{"interfaceName": "eth7"},
			"conditions": []any{Object{
				"type": "Ready", "status": "True", "reason": "Driver", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z",
			}},
		}}},
	})
	t.Must("a driver writes its data, without a conflict", err)
	t.ok(s.report(unhealthy))
	claim, err = s.awaitDevice(healthyType, "False")
	t.Must("its device is reported as unhealthy", err)
	device := claim.Objects("status", "devices")[0]
	t.Check("the driver's data is left alone", errors.Join(
		equal("devices", len(claim.Objects("status", "devices")), 1),
		equal("data", device.Text("data", "key"), "value"),
		equal("networkData", device.Text("networkData", "interfaceName"), "eth7"),
		equal("Ready", deviceCondition(claim, "Ready").Text("reason"), "Driver")))
	t.Check("the time of the other condition is left alone",
		equal("condition", deviceCondition(claim, preparedType), prepared))
	t.Check("fields of devlet are devlet's", hasManager(claim, "devlet"))

	h.Kill()
	t.Must("devlet is killed and starts again", h.restart())
	t.Must("the driver connects", node.Until(soon, func() error { return h.serving(s.driver) }))
	t.ok(s.report(unhealthy))
	t.Check("devlet compares the claim", h.awaitSuccess("claim-status"))
	again, err := t.Admin.Get(t.path("resourceclaims", "shared"))
	t.Check("nothing is written again", errors.Join(err, equal("status", again.At("status"), claim.At("status"))))
	t.ok(s.report(healthy))
	_, err = s.awaitDevice(healthyType, "True")
	t.Check("its device is reported as healthy", err)
	_, err = t.Admin.Patch(path, Object{"status": Object{"devices": nil}})
	t.ok(err)
	t.Must("another writer removes everything, and the API server restarts", t.Restart())
	_, err = s.awaitDevice(preparedType, "True")
	t.Check("devlet compares the claim after a new list", err)

	t.ok(t.Admin.Delete(t.path("pods", "first"), 0))
	_, err = t.Admin.Await(t.path("resourceclaims", "shared"), soon, func(o Object) error {
		return errors.Join(equal("allocation", o.At("status", "allocation"), nil), equal("devices", o.At("status", "devices"), nil))
	})
	t.Check("the control plane removes devices with their allocation", err)
	t.Must("devlet removes the pod", h.awaitRemoved(first, soon))
	second := s.user("second")
	t.Must("devlet admits another pod", h.awaitAdmitted(second, soon))
	_, err = s.awaitDevice(preparedType, "True")
	t.Check("and its device is reported again", err)
}

// hasManager returns an error unless a field manager has written a part of the status.
func hasManager(o Object, name string) error {
	for _, entry := range o.Objects("metadata", "managedFields") {
		if entry.Text("manager") == name && entry.Text("operation") == "Apply" && entry.Text("subresource") == "status" {
			return nil
		}
	}
	return fmt.Errorf("no fields of %s: %v", name, o.At("metadata", "managedFields"))
}

// claimStatusOfNode has the identity of a node, which may never write devices of claims.
func claimStatusOfNode(t *T) {
	s := newScene(t)
	first := s.shared("first")
	t.Must("devlet admits a pod", s.h.awaitAdmitted(first, soon))
	t.run(first)
	t.Must("devlet knows its identity", node.Until(soon, func() error {
		view, err := s.h.kubernetes()
		return errors.Join(err, equal("identity", view.Text("identity"), "system:node:"+s.h.name))
	}))
	t.ok(s.report(unhealthy))
	t.Must("it reports the health of the device to the pod", t.awaitHealth("first", "claim:device", "", "Unhealthy"))
	view, err := s.h.kubernetes()
	t.ok(err)
	tried := slices.ContainsFunc(view.Objects("reconcilers"), func(r Object) bool { return r.Text("name") == "claim-status" })
	t.Check("it does not try to write the claim", equal("tried", tried, false))
	claim, err := t.Admin.Get(t.path("resourceclaims", "shared"))
	t.Check("the claim has no devices", errors.Join(err, equal("devices", claim.At("status", "devices"), nil)))
}

// claimStatusWithoutRight lacks one rule after the other.
func claimStatusWithoutRight(t *T) {
	const role = "/apis/rbac.authorization.k8s.io/v1/clusterroles/devlet-agent"
	h := t.host()
	account := h.account()
	complete, err := t.Admin.Get(role)
	t.ok(err)
	without := func(resources ...string) {
		rules := slices.DeleteFunc(complete.Objects("rules"), func(rule Object) bool {
			return slices.Contains(resources, fmt.Sprint(rule.At("resources").([]any)[0]))
		})
		_, err := t.Admin.Patch(role, Object{"rules": rules})
		t.ok(err)
	}
	without("resourceclaims/status", "resourceclaims/driver")
	s := t.sceneOf(h, account)
	first := s.shared("first")
	t.Must("devlet admits a pod", h.awaitAdmitted(first, soon))
	t.Check("devlet names the missing rule", h.awaitError("claim-status", `patch resource "resourceclaims/status"`, soon))
	if t.minor() >= 36 {
		without("resourceclaims/driver")
		t.Check("devlet names the missing rule for the driver", h.awaitError("claim-status", "associated-node:patch", soon))
	}
	without()
	_, err = s.awaitDevice(preparedType, "True")
	t.Check("devlet writes the devices once the role is complete", err)
}

// claimWaits has a pod whose claim is allocated long after it was bound to the node, and a pod whose device another one has.
func claimWaits(t *T) {
	s := newScene(t)
	first := s.bound("first")
	t.Check("devlet says that it waits for the allocation", s.h.awaitWaiting(first, "allocated"))
	grown()
	s.allocate(first)
	_, err := t.Admin.Patch(t.path("pods", "first"), Object{"metadata": Object{"annotations": Object{"look": "again"}}})
	t.ok(err)
	t.Check("a change of the pod ends the pause", s.h.awaitAdmitted(first, 5*time.Second))

	second := s.bound("second")
	s.allocate(second)
	t.Check("devlet says that another claim has the device", s.h.awaitWaiting(second, "device-0"))
	grown()
	t.ok(t.Admin.Delete(t.path("pods", "first"), 0))
	t.Must("the first pod is removed", s.h.awaitRemoved(first, soon))
	t.Check("a change of the node ends the pause", s.h.awaitAdmitted(second, 5*time.Second))
}

// grown waits until the pauses of a pod that waits are longer than 5 s. This is the point of the test.
func grown() { time.Sleep(25 * time.Second) }

// bound creates a pod that does not wait for the scheduler, so its claim is not allocated.
func (s *scene) bound(name string) Object {
	s.create(pod{name: name, host: s.h, template: "one", bound: true})
	bound, err := s.Admin.Await(s.path("pods", name), soon, func(o Object) error {
		if s.claimOf(o) == "" {
			return errors.New("it has no claim")
		}
		return nil
	})
	s.Must("the control plane makes a claim for "+name, err)
	return bound
}

// allocate gives a pod's claim the only device.
func (s *scene) allocate(pod Object) {
	_, err := s.Admin.Patch(s.path("resourceclaims", s.claimOf(pod), "status"), Object{"status": Object{
		"allocation": Object{"devices": Object{"results": []any{Object{
			"request": "device", "driver": s.driver, "pool": s.h.name, "device": "device-0",
		}}}},
		"reservedFor": []any{Object{"resource": "pods", "name": pod.Name(), "uid": pod.UID()}},
	}})
	s.ok(err)
}

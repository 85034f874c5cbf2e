package main

import (
	"errors"
	"fmt"
	"net/url"
	"sync"

	"devlet.test/interop/kubernetes/cluster"
)

// pods tests that pods of the API server are admitted and removed by themselves.
var pods = []scenario{
	{name: "pod-appears", run: podAppears},
	{name: "pod-of-device-plugin", run: podOfDevicePlugin},
	{name: "pod-waits-for-driver", run: podWaitsForDriver},
	{name: "pod-claim-taken-away", run: podClaimTakenAway, alone: true},
	{name: "pod-terminates", run: podTerminates},
	{name: "pod-never-started", run: podNeverStarted},
	{name: "pod-finally-deleted", run: podFinallyDeleted},
	{name: "pod-force-deleted", run: podForceDeleted},
	{name: "pod-replaced", run: podReplaced},
	{name: "pod-shares-claim", run: podSharesClaim},
	{name: "pod-with-extended-resource", run: podWithExtendedResource},
	{name: "pod-deleted-without-driver", run: podDeletedWithoutDriver},
	{name: "pods-ten-thousand", run: podsTenThousand, alone: true},
}

// scene is a node with devlet as its device part, a DRA driver of testkit and its slices.
type scene struct {
	*T
	h      *host
	driver string
	peer   *peer
}

// newScene starts devlet and a driver with one device, and makes the template `one`.
func newScene(t *T, flags ...string) *scene {
	h := t.host()
	return t.sceneOf(h, h.user, flags...)
}

// sceneOf is newScene on a host, with the rights of a user.
func (t *T) sceneOf(h *host, user cluster.User, flags ...string) *scene {
	s := &scene{T: t, h: h, driver: t.name + ".example.com"}
	t.class(s.driver, "")
	t.template("one", s.driver, 1)
	s.h.serveAs(user, flags...)
	s.peer = s.h.testDriver(s.driver)
	s.h.publish(s.driver, "device-0")
	return s
}

// pod creates a pod with a claim of its own, and waits until it is scheduled.
func (s *scene) pod(name string) Object {
	s.create(pod{name: name, host: s.h, template: "one"})
	return s.scheduled(name)
}

// claimUID returns the UID of a pod's claim.
func (s *scene) claimUID(pod Object) string {
	claim, err := s.Admin.Get(s.path("resourceclaims", s.claimOf(pod)))
	s.ok(err)
	return claim.UID()
}

func podAppears(t *T) {
	driver := t.name + ".example.com"
	h := t.host()
	t.class(driver, "")
	t.template("one", driver, 1)
	h.serve()
	process := h.exampleDriver(driver, 2)
	t.Must("the driver publishes its devices", errors.Join(h.awaitSlices(driver, 2, soon), process.Running()))
	t.create(pod{name: "first", host: h, template: "one"})
	bound := t.scheduled("first")
	t.Must("devlet admits it by itself", h.awaitAdmitted(bound, soon))
	claim, err := t.Admin.Get(t.path("resourceclaims", t.claimOf(bound)))
	t.ok(err)
	device := claim.Object("status", "allocation", "devices").Objects("results")[0].Text("device")
	options, err := h.options("first")
	t.Must("devlet prints options", err)
	t.Check("they have the allocated device", cdiDevices(options.CDIDevices, claim.UID(), device))
	t.ok(t.Admin.Delete(t.path("pods", "first"), 0))
	t.Check("devlet removes it by itself", h.awaitRemoved(bound, soon))
	t.Check("its claim is unprepared", h.claimCount(0, soon))
	t.Check("its claim is deleted", t.Admin.AwaitGone(t.path("resourceclaims", claim.Name()), claim.UID(), soon))
}

func podOfDevicePlugin(t *T) {
	h := t.host()
	h.serve()
	h.plugin("example.com/"+t.name, 2)
	// The scheduler binds it once devlet has published the devices.
	t.create(pod{name: "first", host: h, limits: Object{"example.com/" + t.name: "2"}})
	bound := t.scheduled("first")
	t.Must("devlet admits it by itself", h.awaitAdmitted(bound, soon))
	options, err := h.options("first")
	t.Must("devlet prints options", err)
	t.Check("it has both devices", equal("devices", len(options.Devices[0].IDs), 2))
	t.create(pod{name: "second", host: h, limits: Object{"example.com/" + t.name: "1"}})
	t.ok(t.Admin.Delete(t.path("pods", "first"), 0))
	t.Check("another pod gets a device after it", h.awaitAdmitted(t.scheduled("second"), soon))
}

// podWaitsForDriver schedules a pod before its driver runs.
func podWaitsForDriver(t *T) {
	driver := t.name + ".example.com"
	h := t.host()
	t.class(driver, "")
	t.template("one", driver, 1)
	h.serve()
	h.publish(driver, "device-0")
	t.create(pod{name: "first", host: h, template: "one"})
	bound := t.scheduled("first")
	t.Check("devlet says that it waits for the driver", h.awaitWaiting(bound, driver))
	t.Check("an event says so, too", t.Admin.AwaitList(t.path("events"),
		url.Values{"fieldSelector": {"involvedObject.uid=" + bound.UID() + ",reason=FailedPrepareDynamicResources"}}, soon,
		func(events []Object) error { return equal("some events", len(events) > 0, true) }))
	h.testDriver(driver)
	t.Check("the driver comes, and devlet admits the pod", h.awaitAdmitted(bound, soon))
}

// podClaimTakenAway takes the claim away from a pod that waits for its driver, as for another pod.
func podClaimTakenAway(t *T) {
	driver := t.name + ".example.com"
	h := t.host()
	t.class(driver, "")
	t.template("one", driver, 1)
	h.serve()
	h.publish(driver, "device-0")
	t.create(pod{name: "first", host: h, template: "one"})
	bound := t.scheduled("first")
	t.Must("devlet waits for the driver", h.awaitWaiting(bound, driver))
	// It would reserve the claim again.
	t.ControllerManager.Pause()
	path := t.path("resourceclaims", t.claimOf(bound), "status")
	claim, err := t.Admin.Patch(path, Object{"status": Object{"reservedFor": nil}})
	t.ok(err)
	peer := h.testDriver(driver)
	t.Check("the driver comes, and devlet sees that the claim is not reserved", h.awaitWaiting(bound, "not allowed to use"))
	t.Check("it is not prepared", equal("calls", peer.asked("NodePrepareResources", claim.UID()), 0))
	_, err = t.Admin.Patch(path, Object{"status": Object{
		"reservedFor": []any{Object{"resource": "pods", "name": "first", "uid": bound.UID()}},
	}})
	t.ok(err)
	t.Check("reserved again, it is prepared", h.awaitAdmitted(bound, late))
}

// podNeverStarted deletes pods whose containers have not been started. The test is the node agent.
func podNeverStarted(t *T) {
	h := t.host()
	resource := "example.com/" + t.name
	h.serve(t.config("finalDelete: true")...)
	h.plugin(resource, 2)
	limits := Object{resource: "1"}
	waiting := t.create(pod{name: "waiting", host: h, bound: true, limits: limits})
	silent := t.create(pod{name: "silent", host: h, bound: true, limits: limits})
	t.Must("devlet admits two pods", errors.Join(h.awaitAdmitted(waiting, soon), h.awaitAdmitted(silent, soon)))
	t.setState(waiting, false, Object{"waiting": Object{"reason": "ImagePullBackOff"}})
	t.ok(t.Admin.Delete(t.path("pods", "waiting"), 1))
	t.ok(t.Admin.Delete(t.path("pods", "silent"), 1))
	t.Check("devlet deletes the pod whose container waits", t.Admin.AwaitGone(t.path("pods", "waiting"), waiting.UID(), soon))
	t.Check("devlet says that the other one has no status", h.awaitWaiting(silent, "the node agent must report it"))
	t.end(silent)
	t.Check("devlet deletes it then", t.Admin.AwaitGone(t.path("pods", "silent"), silent.UID(), soon))
}

// podTerminates deletes a pod whose container runs: it may use its device until it has ended. The test is the node agent.
func podTerminates(t *T) {
	s := newScene(t)
	first := s.pod("first")
	t.Must("devlet admits it", s.h.awaitAdmitted(first, soon))
	claim := s.claimUID(first)
	t.run(first)
	t.ok(t.Admin.Delete(t.path("pods", "first"), 300))
	// devlet has seen the deletion when it has admitted a pod that came later.
	s.h.plugin("example.com/later", 1)
	later := t.create(pod{name: "later", host: s.h, bound: true, limits: Object{"example.com/later": "1"}})
	t.Must("devlet admits a later pod", s.h.awaitAdmitted(later, soon))
	pods, err := s.h.admitted()
	t.ok(err)
	t.Check("the terminating pod keeps its claim", errors.Join(
		equal("admitted", pods[first.UID()].UID, first.UID()), equal("prepared", pods[first.UID()].holds(), true),
		equal("calls", s.peer.asked("NodeUnprepareResources", claim), 0)))
	t.end(first)
	t.Check("its claim is unprepared once the container has ended", s.peer.awaitAsked("NodeUnprepareResources", claim))
	t.Check("devlet removes the pod", s.h.awaitReleased(first))
	object, err := t.Admin.Get(t.path("pods", "first"))
	t.Check("its object stays", errors.Join(err, equal("UID", object.UID(), first.UID())))
	t.ok(t.Admin.Delete(t.path("pods", "first"), 0))
	t.Check("devlet forgets it with its object", s.h.awaitRemoved(first, soon))
}

// podFinallyDeleted has devlet delete the object of a terminating pod, after its claim is unprepared.
func podFinallyDeleted(t *T) {
	s := newScene(t, t.config("finalDelete: true")...)
	first := s.pod("first")
	t.Must("devlet admits it", s.h.awaitAdmitted(first, soon))
	claim := s.claimUID(first)
	t.run(first)
	t.ok(s.peer.command(`fault NodeUnprepareResources "wait"`))
	t.ok(t.Admin.Delete(t.path("pods", "first"), 300))
	t.end(first)
	t.Must("the driver is asked to unprepare", s.peer.awaitAsked("NodeUnprepareResources", claim))
	object, err := t.Admin.Get(t.path("pods", "first"))
	t.Check("the object is there until it has", errors.Join(err, equal("UID", object.UID(), first.UID())))
	t.ok(s.peer.command("proceed"))
	t.Check("devlet deletes the object", t.Admin.AwaitGone(t.path("pods", "first"), first.UID(), soon))
}

// podForceDeleted gives the only device to another pod.
func podForceDeleted(t *T) {
	s := newScene(t)
	first := s.pod("first")
	t.Must("devlet admits it", s.h.awaitAdmitted(first, soon))
	claim := s.claimUID(first)
	t.ok(s.peer.command(`fault NodeUnprepareResources "wait"`))
	t.ok(t.Admin.Delete(t.path("pods", "first"), 0))
	second := s.pod("second")
	t.Must("the driver is asked to unprepare", s.peer.awaitAsked("NodeUnprepareResources", claim))
	t.Check("the device is not prepared again before that",
		equal("prepare calls", s.peer.asked("NodePrepareResources", s.claimUID(second)), 0))
	t.ok(s.peer.command("proceed"))
	t.Check("then the next pod has it", s.h.awaitAdmitted(second, soon))
	t.Check("the first one is removed", s.h.awaitRemoved(first, soon))
}

// podReplaced creates another pod of the same name at once, as a StatefulSet does.
func podReplaced(t *T) {
	s := newScene(t)
	first := s.pod("same")
	t.Must("devlet admits it", s.h.awaitAdmitted(first, soon))
	t.ok(t.Admin.Delete(t.path("pods", "same"), 0))
	second := s.pod("same")
	t.Check("the pod is another one", func() error {
		if first.UID() == second.UID() {
			return errors.New("it has the same UID")
		}
		return nil
	}())
	t.Check("devlet admits it", s.h.awaitAdmitted(second, soon))
	t.Check("and removes the earlier one", s.h.awaitRemoved(first, soon))
	t.Check("one claim is left", s.h.claimCount(1, soon))
}

func podSharesClaim(t *T) {
	s := newScene(t)
	t.claim("shared", s.driver, 1)
	claim, err := t.Admin.Get(t.path("resourceclaims", "shared"))
	t.ok(err)
	t.create(pod{name: "first", host: s.h, claim: "shared"})
	t.create(pod{name: "second", host: s.h, claim: "shared"})
	first, second := t.scheduled("first"), t.scheduled("second")
	t.Must("devlet admits the first", s.h.awaitAdmitted(first, soon))
	t.Must("devlet admits the second", s.h.awaitAdmitted(second, soon))
	t.Check("the claim is prepared once", equal("calls", s.peer.asked("NodePrepareResources", claim.UID()), 1))
	t.ok(t.Admin.Delete(t.path("pods", "first"), 0))
	t.Check("the first is removed", s.h.awaitRemoved(first, soon))
	t.Check("the claim stays prepared", equal("calls", s.peer.asked("NodeUnprepareResources", claim.UID()), 0))
	t.ok(t.Admin.Delete(t.path("pods", "second"), 0))
	t.Check("the second is removed", s.h.awaitRemoved(second, soon))
	t.Check("the claim is unprepared", s.peer.awaitAsked("NodeUnprepareResources", claim.UID()))
}

// podWithExtendedResource asks for an extended resource that a DeviceClass provides.
func podWithExtendedResource(t *T) {
	driver, resource := t.name+".example.com", "example.com/"+t.name
	h := t.host()
	t.class(driver, resource)
	h.serve()
	h.testDriver(driver)
	h.publish(driver, "device-0")
	t.create(pod{name: "first", host: h, limits: Object{resource: "1"}})
	bound := t.scheduled("first")
	t.Must("the scheduler makes a claim for it", func() error {
		if t.claimOf(bound) == "" {
			return fmt.Errorf("the status is %v", bound.At("status"))
		}
		return nil
	}())
	t.Check("devlet admits it", h.awaitAdmitted(bound, soon))
	options, err := h.options("first")
	t.Must("devlet prints options", err)
	t.Check("they have the device of the claim", equal("CDI devices", len(options.CDIDevices), 1))
}

func podDeletedWithoutDriver(t *T) {
	s := newScene(t)
	first := s.pod("first")
	t.Must("devlet admits it", s.h.awaitAdmitted(first, soon))
	claim := s.claimUID(first)
	s.peer.kill()
	t.ok(t.Admin.Delete(t.path("pods", "first"), 0))
	t.Check("devlet removes the pod", s.h.awaitRemoved(first, soon))
	t.Check("its claim waits for the driver", s.h.claimCount(1, soon))
	s.peer = s.h.testDriver(s.driver)
	t.Check("the driver returns and unprepares it", s.peer.awaitAsked("NodeUnprepareResources", claim))
	t.Check("no claim is left", s.h.claimCount(0, soon))
}

// podsTenThousand compares the memory of devlet with 10,000 pods on its node, and without them.
func podsTenThousand(t *T) {
	const count, budget = 10_000, 60 << 20
	h := t.host()
	resource := "example.com/" + t.name
	h.serve()
	plugin := h.plugin(resource, 4)
	admit := func(name string) {
		created := t.create(pod{name: name, host: h, bound: true, limits: Object{resource: "1"}})
		t.Must(name+" is admitted", h.awaitAdmitted(created, late))
	}
	admit("before")
	before, err := cluster.Resident(h.PID())
	t.ok(err)
	t.Must("10,000 pods are created", t.flood(h, count))
	admit("after")
	watched, err := cluster.Resident(h.PID())
	t.ok(err)
	within := func(bytes int64) error {
		if bytes > before+budget {
			return fmt.Errorf("%d MiB, %d MiB without the pods", bytes>>20, before>>20)
		}
		return nil
	}
	t.Check("watched, they cost at most 60 MB", within(watched))
	h.Kill()
	t.Must("devlet starts again", h.restart())
	t.ok(plugin.command("register"))
	admit("restarted")
	listed, err := cluster.Resident(h.PID())
	t.ok(err)
	t.Check("listed, they cost at most 60 MB", within(listed))
}

// flood creates bound pods without devices, as large as usual.
func (t *T) flood(h *host, count int) error {
	var group sync.WaitGroup
	errs := make(chan error, count)
	numbers := make(chan int)
	for range 16 {
		group.Go(func() {
			for i := range numbers {
				_, err := t.Admin.Create(t.path("pods"), Object{
					"metadata": Object{"name": fmt.Sprintf("many-%d", i), "labels": Object{"app": "many"}},
					"spec": Object{
						"nodeName": h.name, "terminationGracePeriodSeconds": 0,
						"containers": []any{Object{"name": "main", "image": "none", "env": variables(20)}},
					},
				})
				if err != nil {
					errs <- err
				}
			}
		})
	}
	for i := range count {
		numbers <- i
	}
	close(numbers)
	group.Wait()
	close(errs)
	return <-errs
}

func variables(count int) []any {
	list := []any{}
	for i := range count {
		list = append(list, Object{"name": fmt.Sprintf("VARIABLE_%d", i), "value": "a value of usual length"})
	}
	return list
}

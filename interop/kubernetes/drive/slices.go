package main

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"path/filepath"
	"slices"
	"time"

	"devlet.test/interop/node"
)

// wiping tests that slices of drivers that left are deleted, and others are not.
var wiping = []scenario{
	{name: "slices-of-stopped-driver", run: slicesOfStoppedDriver},
	{name: "slices-after-restart", run: slicesAfterRestart},
	{name: "slices-without-driver", run: slicesWithoutDriver},
	{name: "slices-restored", run: slicesRestored, alone: true},
	{name: "slices-of-earlier-node", run: slicesOfEarlierNode},
}

// wipeDelay is the time after which the slices of a driver are deleted.
const wipeDelay = 30 * time.Second

// uids returns the UIDs of a driver's slices.
func (h *host) uids(driver string) []string {
	list, err := h.slices(driver)
	h.t.ok(err)
	var uids []string
	for _, slice := range list {
		uids = append(uids, slice.UID())
	}
	slices.Sort(uids)
	return uids
}

// awaitWiped waits until a driver has no slices, and returns the time of the deletion.
func (h *host) awaitWiped(driver string, timeout time.Duration) (time.Time, error) {
	err := h.t.Admin.AwaitList(sliceCollection, h.sliceQuery(driver), timeout, func(list []Object) error {
		return equal("slices", len(list), 0)
	})
	if err != nil {
		err = fmt.Errorf("%w; %s", err, h.status())
	}
	return time.Now(), err
}

// deletions counts deleted slices of the node until it is stopped.
func (h *host) deletions() (stop func() []string) {
	_, version, err := h.t.Admin.List(sliceCollection, url.Values{"fieldSelector": {"spec.nodeName=" + h.name}})
	h.t.ok(err)
	ctx, cancel := context.WithCancel(context.Background())
	deleted := make(chan []string, 1)
	go func() {
		var drivers []string
		query := url.Values{"fieldSelector": {"spec.nodeName=" + h.name}, "resourceVersion": {version}}
		h.t.Admin.Watch(ctx, sliceCollection, query, func(kind string, slice Object) bool {
			if kind == "DELETED" {
				drivers = append(drivers, slice.Text("spec", "driver"))
			}
			return true
		})
		deleted <- drivers
	}()
	return func() []string { cancel(); return <-deleted }
}

// slicesOfStoppedDriver stops two drivers: one returns just in time, the other does not.
func slicesOfStoppedDriver(t *T) {
	const returns, leaves = "returns.example.com", "leaves.example.com"
	h := t.host()
	h.serve()
	returning, leaving := h.exampleDriver(returns, 2), h.exampleDriver(leaves, 2)
	t.Must("the drivers publish", errors.Join(h.awaitSlices(returns, 2, soon), h.awaitSlices(leaves, 2, soon)))
	t.Must("the drivers register", node.Until(soon, func() error { return errors.Join(h.serving(returns), h.serving(leaves)) }))
	before := h.uids(returns)
	t.ok(returning.Stop())
	stopped := time.Now()
	t.ok(leaving.Stop())

	// The point of the test: the driver is away for 29 s.
	time.Sleep(time.Until(stopped.Add(wipeDelay - time.Second)))
	t.ok(returning.Start())
	t.Check("after 29 s, the slices of both are there", errors.Join(
		equal("slices", h.uids(returns), before), equal("slices", len(h.uids(leaves)) > 0, true)))
	wiped, err := h.awaitWiped(leaves, soon)
	t.Must("the slices of the driver that left are deleted", err)
	t.Check("after 30 s", between(wiped.Sub(stopped), wipeDelay, wipeDelay+15*time.Second))
	// Its deletion would have been due before the other one.
	t.Check("those of the driver that returned are the same", equal("slices", h.uids(returns), before))
	t.ok(leaving.Start())
	t.Check("the other driver returns, and publishes again", h.awaitSlices(leaves, 2, soon))
}

// slicesAfterRestart has a driver that runs while devlet restarts, and slices of one that never comes.
func slicesAfterRestart(t *T) {
	const live, ghost = "live.example.com", "ghost.example.com"
	h := t.host()
	h.serve()
	h.exampleDriver(live, 2)
	t.Must("the driver publishes", h.awaitSlices(live, 2, soon))
	t.Must("the driver registers", node.Until(soon, func() error { return h.serving(live) }))
	h.Kill()
	h.publish(ghost, "device-0")
	before, deleted := h.uids(live), h.deletions()
	started := time.Now()
	t.Must("devlet is killed and starts again", h.restart())
	t.Check("devlet lists the slices", node.Until(soon, func() error {
		listed, err := h.listedSlices()
		var drivers []string
		for _, slice := range listed {
			drivers = append(drivers, slice.Driver)
		}
		slices.Sort(drivers)
		return errors.Join(err, equal("drivers", slices.Compact(drivers), []string{ghost, live}))
	}))
	wiped, err := h.awaitWiped(ghost, late)
	t.Must("slices without a driver are deleted", err)
	t.Check("after 30 s", between(wiped.Sub(started), wipeDelay, wipeDelay+15*time.Second))
	t.Check("no slice of the live driver was deleted", equal("deleted slices of", deleted(), []string{ghost}))
	t.Check("they are the same", equal("slices", h.uids(live), before))
}

// slicesWithoutDriver has slices of a driver that crashed before it registered.
func slicesWithoutDriver(t *T) {
	const ghost = "ghost.example.com"
	h := t.host()
	h.serve()
	t.Must("devlet runs", h.awaitReconciler("slices"))
	published := time.Now()
	h.publish(ghost, "device-0")
	wiped, err := h.awaitWiped(ghost, late)
	t.Must("they are deleted", err)
	t.Check("after 30 s", between(wiped.Sub(published), wipeDelay, wipeDelay+15*time.Second))
}

// slicesRestored restores slices of a driver that left, with the database of the API server.
func slicesRestored(t *T) {
	const gone = "gone.example.com"
	h := t.host()
	h.serve()
	peer := h.testDriver(gone)
	h.publish(gone, "device-0")
	t.Must("the driver registers", node.Until(soon, func() error { return h.serving(gone) }))
	snapshot := filepath.Join(t.dir, "snapshot")
	t.ok(t.Snapshot(snapshot))
	peer.stop()
	_, err := h.awaitWiped(gone, late)
	t.Must("the slices of a driver that left are deleted", err)
	t.Must("etcd is restored", t.Restore(snapshot))
	t.Must("the slices are back", equal("slices", len(h.uids(gone)), 1))
	_, err = h.awaitWiped(gone, late)
	t.Check("they are deleted again", err)
}

// slicesOfEarlierNode creates the Node again, so that the driver's slices have an owner that does not exist. The driver
// publishes them again and again, and the garbage collector deletes them.
func slicesOfEarlierNode(t *T) {
	const driver = "earlier.example.com"
	const stale = "driver " + driver + " is an earlier Node object"
	h := t.host()
	h.serve()
	process := h.exampleDriver(driver, 2)
	t.Must("the driver publishes", h.awaitSlices(driver, 2, soon))
	t.Must("the driver registers", node.Until(soon, func() error { return h.serving(driver) }))
	t.ok(t.Admin.Delete(nodePath(h.name), -1))
	h.createObject()
	t.Must("devlet reports that the driver must restart", h.awaitProblem(stale, true))
	_, err := h.awaitWiped(driver, late)
	t.Must("the garbage collector deletes the slices", err)
	t.Check("devlet still reports it", h.awaitProblem(stale, true))
	t.ok(process.Stop())
	t.ok(process.Start())
	t.Check("the driver restarts and publishes", h.awaitSlices(driver, 2, late))
	t.Check("devlet does not report it any longer", h.awaitProblem(stale, false))
}

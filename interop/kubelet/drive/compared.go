package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"devlet.test/interop/node"
)

// compared run on both nodes. Their measurements are the table.
var compared = []scenario{
	{name: "judge", run: judged, bare: true},
	{name: "first-pod", run: firstPod, bare: true, shield: true},
	{name: "away", run: away, bare: true, shield: true},
	{name: "hung-allocate", run: hungAllocate, bare: true, shield: true},
	{name: "force-delete", run: forceDelete, bare: true, shield: true},
	{name: "reboot", run: reboot, bare: true, shield: true},
}

const unexpected = "UnexpectedAdmissionError"

// judged: the judge finds a container without a device of its pod, and a device that is open twice.
func judged(t *T) {
	t.plugin("judged", 2)
	without := pod{name: "without", wants: map[string]int{"judged": 1}}.object()
	without["spec"].(Object)["containers"].([]Object)[0]["resources"] = Object{}
	_, err := t.m.cluster.Admin.Create(podsPath, without)
	t.ok(err)
	t.Check("a container without a device is found", node.Until(soon, func() error {
		return contains(strings.Join(violations(), "; "), "without/main")
	}))
	t.remove("without", 0)
	t.ok(idleExcept("judged"))

	t.create(pod{name: "owner", wants: map[string]int{"judged": 1}})
	owner, err := t.holding("owner", soon)
	t.Must("a pod holds a device", errors.Join(err, none(violations())))
	thief := pod{name: "thief", wants: map[string]int{"judged": 1}}.object()
	main := thief["spec"].(Object)["containers"].([]Object)[0]
	main["resources"] = Object{}
	main["command"] = []string{"sh", "-c", "mknod /dev/" + owner.open[0] + " c 1 3; " + opening + "1000000"}
	_, err = t.m.cluster.Admin.Create(podsPath, thief)
	t.ok(err)
	t.Check("a device that is open twice is found", node.Until(soon, func() error {
		return contains(strings.Join(violations(), "; "), owner.open[0]+" is open in")
	}))
}

func firstPod(t *T) {
	p := t.plugin("first-pod", 4)
	started := time.Now()
	t.create(pod{name: "one", wants: map[string]int{"first-pod": 2}, scheduled: true})
	_, err := t.ready("one", soon)
	t.Must("a scheduled pod is ready", err)
	t.measured("a pod is ready after", "%s", seconds(time.Since(started)))
	one, err := t.holding("one", soon)
	t.Must("it holds two devices", err)
	t.Check("they are those of its environment", equal("devices", one.open, strings.Split(one.env["FIRST_POD"], ",")))
	t.Check("the plugin allocated these", equal("devices", p.calls("Allocate")[0].ids(), one.open))

	t.create(pod{name: "two", wants: map[string]int{"first-pod": 2}, scheduled: true})
	_, err = t.holding("two", soon)
	t.Check("a second pod holds the others", errors.Join(err, none(violations())))
	t.remove("one", 0)
	t.create(pod{name: "three", wants: map[string]int{"first-pod": 2}, scheduled: true})
	three, err := t.holding("three", soon)
	t.Check("a third pod gets the devices of a deleted one", errors.Join(err, equal("devices", three.open, one.open)))
}

// away: the plugin does not run when the pod is admitted.
func away(t *T) {
	p := t.plugin("away", 2)
	p.Kill()
	if !t.m.shield {
		t.Must("the devices are gone with the plugin", p.offered(0))
	}
	t.create(pod{name: "bound", wants: map[string]int{"away": 1}})
	if !t.m.shield {
		_, err := t.rejected("bound", unexpected, soon)
		t.Must("the pod is failed", err)
		t.ok(p.Start())
		t.Must("the plugin is back", p.offered(2))
		t.create(pod{name: "later", wants: map[string]int{"away": 1}})
		_, err = t.holding("later", soon)
		t.Check("a new pod gets a device", err)
		_, err = t.rejected("bound", unexpected, soon)
		t.Check("the pod stays failed", err)
		t.measured("a pod is bound while the plugin is away", "failed for good")
		return
	}
	t.Must("the container waits", t.waiting("bound", "CreateContainerConfigError", soon))
	message, err := t.event("bound", p.resource)
	t.Check("an event names the resource", err)
	fmt.Println("the event is:", message)
	back := time.Now()
	t.ok(p.Start())
	_, err = t.holding("bound", soon)
	t.Must("the pod starts once the plugin is back", err)
	t.measured("a pod is bound while the plugin is away", "runs %s after the plugin is back", seconds(time.Since(back)))
}

// hungAllocate: the plugin does not answer Allocate, and another pod is created.
func hungAllocate(t *T) {
	p := t.plugin("hung-allocate", 2)
	// The usual time of a pod without devices.
	started := time.Now()
	t.create(pod{name: "usual"})
	_, err := t.ready("usual", soon)
	t.Must("a pod without devices is ready", err)
	usual := time.Since(started)

	p.script("Allocate hang")
	t.create(pod{name: "victim", wants: map[string]int{"hung-allocate": 1}})
	t.Must("the plugin hangs", p.called("Allocate", 1))
	timer := time.AfterFunc(*hang, func() { p.script() })
	defer timer.Stop()
	started = time.Now()
	t.create(pod{name: "other"})
	_, err = t.ready("other", late)
	t.Must("another pod without devices is ready", err)
	waited := time.Since(started)
	t.measured(fmt.Sprintf("a plugin hangs for %v in Allocate: another pod is ready after", *hang),
		"%s (usually %s)", seconds(waited), seconds(usual))
	if t.m.shield {
		var slow error
		if waited > *hang/2 {
			slow = fmt.Errorf("it waited %v", waited)
		}
		t.Check("the other pod does not wait for the plugin", slow)
	}
	_, err = t.holding("victim", soon)
	t.Check("the pod of the plugin starts after the hang", err)
}

// forceDelete: a pod is force-deleted while its container takes no notice of SIGTERM, and a successor gets its device.
func forceDelete(t *T) {
	t.plugin("force-delete", 1)
	t.create(pod{name: "old", wants: map[string]int{"force-delete": 1}, grace: 30})
	_, err := t.holding("old", soon)
	t.Must("a pod holds the only device", err)
	stop := watch()
	t.ok(t.m.cluster.Admin.Delete(podPath("old"), 0))
	deleted := time.Now()
	t.create(pod{name: "new", wants: map[string]int{"force-delete": 1}})
	_, err = t.holding("new", soon)
	took := time.Since(deleted)
	found := append(stop(), violations()...)
	t.Must("the successor holds it", err)
	if t.m.shield {
		t.Check("never both", none(found))
	}
	both := "never"
	if len(found) > 0 {
		both = "yes"
	}
	t.measured("force delete: both pods have the device open", "%s (the successor runs after %s)", both, seconds(took))
}

// reboot counts pods that survive reboots. The plugin is a pod, as that of a DaemonSet is.
func reboot(t *T) {
	const bound, static = 8, 4
	kind := "reboot"
	p := t.newPlugin(kind, bound+static)
	wants := map[string]int{kind: 1}
	t.pluginPod(p)
	t.Must("the plugin is registered", p.offered(bound+static))
	pods := map[string]bool{}
	for i := range bound {
		pods[fmt.Sprintf("bound-%d", i)] = false
	}
	for i := range static {
		pods[fmt.Sprintf("static-%d-%s", i, nodeName)] = true
	}
	// It shows that the reboot itself costs no pod.
	t.create(pod{name: "plain"})
	alive, total := map[bool]int{}, map[bool]int{}
	var slowest time.Duration
	for round := range *rounds {
		t.populate(pods, wants)
		for name := range pods {
			_, err := t.holding(strings.TrimSuffix(name, "-"+nodeName), late)
			if err != nil {
				t.Must("before the reboot, "+name+" holds a device", err)
			}
		}
		t.ok(t.m.reboot())
		booted := time.Now()
		if err := t.m.ready(); err != nil {
			t.Must("the node is ready after the reboot", err)
		}
		t.Must("the plugin is registered again", p.offered(bound+static))
		_, err := t.holding("plain", soon)
		t.Check("a pod without devices survives", err)
		// Each pod either runs again, or is failed.
		err = node.Until(late, func() error {
			var failed error
			all := instances()
			for name := range pods {
				o, err := t.m.cluster.Admin.Get(podPath(name))
				if err != nil {
					failed = errors.Join(failed, err)
					continue
				}
				_, dead := held(all, strings.TrimSuffix(name, "-"+nodeName), "main")
				rejected := o.Text("status", "phase") == "Failed" && o.Text("status", "reason") == unexpected
				if dead != nil && !rejected {
					failed = errors.Join(failed, fmt.Errorf("%s: %s", name, describe(o)))
				}
			}
			return failed
		})
		t.Check(fmt.Sprintf("round %d: each pod runs or is rejected", round+1), err)
		slowest = max(slowest, time.Since(booted))
		for _, i := range instances() {
			for name, isStatic := range pods {
				if i.env["POD"] == strings.TrimSuffix(name, "-"+nodeName) {
					alive[isStatic]++
				}
			}
		}
		total[false] += bound
		total[true] += static
		t.Check("no device is open twice", none(violations()))
		fmt.Printf("%s: round %d: %d of %d bound and %d of %d static pods survived\n", t.name, round+1,
			alive[false], total[false], alive[true], total[true])
	}
	t.measured(fmt.Sprintf("%d reboots: surviving pods", *rounds), "%d of %d bound, %d of %d static",
		alive[false], total[false], alive[true], total[true])
	if t.m.shield {
		t.Check("all bound pods survive", equal("bound pods", alive[false], total[false]))
		t.Check("all static pods survive", equal("static pods", alive[true], total[true]))
	}
}

// populate creates the pods that do not exist, and again those that failed.
func (t *T) populate(pods map[string]bool, wants map[string]int) {
	for name, isStatic := range pods {
		o, err := t.m.cluster.Admin.Get(podPath(name))
		if err == nil && o.Text("status", "phase") != "Failed" {
			continue
		}
		p := pod{name: strings.TrimSuffix(name, "-"+nodeName), wants: wants}
		if isStatic {
			if err == nil {
				t.ok(os.Remove(filepath.Join(t.m.dir, "pods", p.name+".json")))
				t.ok(t.m.cluster.Admin.AwaitGone(podPath(name), o.UID(), soon))
			}
			t.createStatic(p)
			continue
		}
		if err == nil {
			t.remove(name, 0)
		}
		t.create(p)
	}
}

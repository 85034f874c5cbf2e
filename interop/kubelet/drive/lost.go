package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"devlet.test/interop/node"
)

// lost are scenarios in which the kubelet or devlet loses its record, or the kubelet keeps too much.
var lost = []scenario{
	{name: "names", run: names, shield: true},
	{name: "checkpoint-lost", run: checkpointLost, shield: true},
	{name: "database-lost", run: databaseLost, shield: true},
	{name: "left-over", run: leftOver, shield: true},
}

// checkpoint is the kubelet's record of devices.
const checkpoint = kubeletDir + "/device-plugins/kubelet_internal_checkpoint"

// status is what is read of `devlet status`.
type status struct {
	Shield struct {
		KubeletVersion, Runtime, CDI string
		Leases                       int
	}
	Problems []struct{ What, Hint string }
}

func (m *machine) status() (status, error) {
	var found status
	out, err := m.ask("status", "-o", "json")
	// Its exit code tells whether there is a problem.
	if failed := json.Unmarshal([]byte(out), &found); failed != nil {
		return found, errors.Join(err, failed)
	}
	return found, nil
}

// problem waits until a problem has all of these texts.
func (m *machine) problem(texts ...string) error {
	return node.Until(soon, func() error {
		found, err := m.status()
		if err != nil {
			return err
		}
		for _, problem := range found.Problems {
			all := problem.What + " " + problem.Hint
			if !slices.ContainsFunc(texts, func(text string) bool { return !strings.Contains(all, text) }) {
				return nil
			}
		}
		return fmt.Errorf("no problem has %q: %+v", texts, found.Problems)
	})
}

// without waits until no problem has a text.
func (m *machine) without(text string) error {
	return node.Until(soon, func() error {
		found, err := m.status()
		if err == nil {
			err = noProblem(found, text)
		}
		return err
	})
}

func noProblem(found status, text string) error {
	for _, problem := range found.Problems {
		if strings.Contains(problem.What, text) {
			return errors.New(problem.What)
		}
	}
	return nil
}

// names: devlet shows the pods of the kubelet by name, and the kubelet and the runtime.
func names(t *T) {
	t.plugin("names", 2)
	t.create(pod{name: "named", wants: map[string]int{"names": 1}})
	held, err := t.holding("named", soon)
	t.Must("a pod has a device", err)
	has := func(parts []string, args ...string) error {
		return node.Until(soon, func() error {
			out, err := t.m.ask(args...)
			for _, part := range parts {
				err = errors.Join(err, contains(out, part))
			}
			return err
		})
	}
	device := held.open[0]
	t.Check("get pods names it", has([]string{"named", "default"}, "get", "pods"))
	t.Check("get devices names it", has([]string{device, "default/named"}, "get", "devices"))
	t.Check("describe pod shows its container and device", has([]string{"main", device}, "describe", "pod", "named"))
	t.Check("describe device names it", has([]string{"default/named", "main"}, "describe", "device", device))
	t.Check("shield leases names it", has([]string{"default/named"}, "shield", "leases"))
	found, err := t.m.status()
	if err == nil && (!strings.HasPrefix(found.Shield.KubeletVersion, "v1.") || found.Shield.CDI != "on" ||
		!strings.Contains(found.Shield.Runtime, "containerd")) {
		err = fmt.Errorf("%+v", found.Shield)
	}
	t.Check("status shows the kubelet, the runtime and CDI", err)
}

// checkpointLost: the kubelet's checkpoint is removed while it is stopped, and a pod runs.
func checkpointLost(t *T) {
	const kind = "checkpoint-lost"
	t.plugin(kind, 1)
	wants := map[string]int{kind: 1}
	t.create(pod{name: "forgotten", wants: wants})
	first, err := t.holding("forgotten", soon)
	t.Must("a pod has a device", err)
	watched := watch()
	t.m.kubelet.Kill()
	t.ok(os.Remove(checkpoint))
	t.ok(t.m.restartKubelet())
	t.Must("the kubelet is restarted", t.m.ready())
	t.Check("the pod runs on", same(t, "forgotten", first))
	t.Check("devlet reports it, and what to do",
		t.m.problem("default/forgotten", domain+kind, "kubectl delete pod -n default forgotten"))
	// The kubelet believes that the device is free as soon as the pod is gone for it.
	t.ok(t.m.cluster.Admin.Delete(podPath("forgotten"), 0))
	t.create(pod{name: "successor", wants: wants})
	_, err = t.holding("successor", late)
	t.Check("a successor of the deleted pod gets the device", err)
	t.Check("the problem is gone", t.m.without("default/forgotten"))
	t.Check("no device is open twice", none(watched()))
}

// databaseLost: devlet's database is removed while pods run. A pod is force deleted, and gets a successor.
func databaseLost(t *T) {
	const kind = "database-lost"
	p := t.plugin(kind, 1)
	wants := map[string]int{kind: 1}
	t.create(pod{name: "old", wants: wants})
	old, err := t.holding("old", soon)
	t.Must("a pod has a device", err)
	watched := watch()
	t.m.devlet.Kill()
	t.ok(os.RemoveAll(filepath.Join(t.m.root(), "devlet")))
	t.Must("devlet starts without its database", t.m.startDevlet())
	t.Must("the devices are offered", p.offered(1))
	t.Check("devlet knows that the container runs", node.Until(soon, func() error {
		out, err := t.m.ask("shield", "leases")
		for line := range strings.Lines(out) {
			if strings.Contains(line, domain+kind) {
				fields := strings.Fields(line)
				return errors.Join(err, contains(line, "default/old"), equal("running", fields[len(fields)-1], "1"))
			}
		}
		return errors.Join(err, errors.New(out))
	}))
	t.ok(t.m.cluster.Admin.Delete(podPath("old"), 0))
	t.create(pod{name: "successor", wants: wants})
	_, err = t.holding("successor", late)
	t.Check("a successor gets the device", err)
	t.Check("the first container has ended before", none(watched()))
	if again, failed := held(instances(), "old", "main"); failed == nil && again.container == old.container {
		t.Check("the first container has ended", errors.New(again.String()))
	}
}

// leftOver: the kubelet's checkpoint names a pod that is gone until the next allocation.
func leftOver(t *T) {
	const kind = "left-over"
	t.plugin(kind, 2)
	wants := map[string]int{kind: 1}
	t.create(pod{name: "gone", wants: wants})
	_, err := t.holding("gone", soon)
	t.Must("a pod has a device", err)
	t.remove("gone", 0)
	t.ok(noContainers())
	text, err := os.ReadFile(checkpoint)
	t.ok(errors.Join(err, contains(string(text), kind)))
	// devlet reads the checkpoint without knowing its leases.
	t.m.devlet.Kill()
	t.ok(os.RemoveAll(filepath.Join(t.m.root(), "devlet")))
	t.Must("devlet starts without its database", t.m.startDevlet())
	out, err := t.m.ask("shield", "adopt")
	t.Check("adopt counts no container", errors.Join(err, contains(out, "0 containers")))
	out, err = t.m.ask("get", "pods")
	if strings.Contains(out, kind) || strings.Contains(out, "gone") {
		err = errors.Join(err, errors.New(out))
	}
	t.Check("the pod is not shown", err)
	t.Check("no plugin beside devlet is reported", t.m.without("beside devlet"))
}

package main

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"devlet.test/interop/node"
)

// pod describes a pod.
type pod struct {
	name string
	// wants are the numbers of devices by kind, of the container `main`.
	wants map[string]int
	// scheduled pods are bound by the scheduler, others by their creator.
	scheduled bool
	// grace is the termination grace period in seconds.
	grace int
	// never: containers that end are not started again.
	never bool
	// init are init containers, sidecars init containers that keep running, and containers are beside `main`.
	init, sidecars, containers []container
}

// domain begins the names of all resources.
const domain = "example.com/"

// container is a container of a pod with its devices by kind.
type container struct {
	name  string
	wants map[string]int
}

// opening opens the devices, and then becomes a sleep that holds them.
const opening = `n=3; for d in $DEVICES; do [ -e "$d" ] && eval "exec $n<$d" && n=$((n+1)); done; exec sleep `

func (p pod) container(c container, seconds string) Object {
	limits, wants, paths := Object{}, []string{}, []string{}
	for _, kind := range slices.Sorted(maps.Keys(c.wants)) {
		limits[domain+kind] = fmt.Sprint(c.wants[kind])
		wants = append(wants, fmt.Sprintf("%s=%d", kind, c.wants[kind]))
		paths = append(paths, "/dev/"+kind+"-*")
	}
	return Object{
		"name": c.name, "image": "localhost/tools:1", "imagePullPolicy": "Never",
		"command":   []string{"sh", "-c", opening + seconds},
		"resources": Object{"limits": limits},
		"env": []Object{
			{"name": "POD", "value": p.name}, {"name": "CONTAINER", "value": c.name},
			{"name": "WANTS", "value": strings.Join(wants, ",")}, {"name": "DEVICES", "value": strings.Join(paths, " ")},
		},
	}
}

// object returns the pod's manifest.
func (p pod) object() Object {
	const forever = "1000000"
	containers := []Object{p.container(container{"main", p.wants}, forever)}
	for _, c := range p.containers {
		containers = append(containers, p.container(c, forever))
	}
	var first []Object
	for _, c := range p.sidecars {
		sidecar := p.container(c, forever)
		sidecar["restartPolicy"] = "Always"
		first = append(first, sidecar)
	}
	for _, c := range p.init {
		first = append(first, p.container(c, "1"))
	}
	spec := Object{
		"containers": containers, "initContainers": first, "hostNetwork": true,
		"automountServiceAccountToken": false, "terminationGracePeriodSeconds": p.grace,
	}
	if p.never {
		spec["restartPolicy"] = "Never"
	}
	if !p.scheduled {
		spec["nodeName"] = nodeName
	}
	return Object{
		"apiVersion": "v1", "kind": "Pod", "spec": spec,
		"metadata": Object{"name": p.name, "namespace": "default"},
	}
}

// create creates a pod, which is deleted at the end of the scenario.
func (t *T) create(p pod) Object {
	created, err := t.m.cluster.Admin.Create(podsPath, p.object())
	t.ok(err)
	t.cleanup(func() { t.m.cluster.Admin.Delete(podPath(p.name), 0) })
	return created
}

// createStatic writes the manifest of a static pod, whose name then ends with that of the node.
func (t *T) createStatic(p pod) {
	p.scheduled = true
	manifest, err := json.Marshal(p.object())
	t.ok(err)
	path := filepath.Join(t.m.dir, "pods", p.name+".json")
	t.ok(os.WriteFile(path, manifest, 0o600))
	t.cleanup(func() { os.Remove(path) })
}

// remove deletes a pod and waits until it is gone. A grace period below zero is that of the pod.
func (t *T) remove(name string, grace int) {
	found, err := t.m.cluster.Admin.Get(podPath(name))
	t.ok(err)
	t.ok(t.m.cluster.Admin.Delete(podPath(name), grace))
	t.ok(t.m.cluster.Admin.AwaitGone(podPath(name), found.UID(), soon))
}

// ready waits until a pod is ready, and returns it.
func (t *T) ready(name string, timeout time.Duration) (Object, error) {
	return t.m.cluster.Admin.Await(podPath(name), timeout, func(o Object) error {
		if !isReady(o) {
			return fmt.Errorf("it is not ready: %v", describe(o))
		}
		return nil
	})
}

func isReady(o Object) bool {
	for _, condition := range o.Objects("status", "conditions") {
		if condition.Text("type") == "Ready" {
			return condition.Text("status") == "True"
		}
	}
	return false
}

// describe returns what a person would look at in the status of a pod.
func describe(o Object) string {
	text := o.Text("status", "phase") + " " + o.Text("status", "reason") + " " + o.Text("status", "message")
	for _, list := range []string{"initContainerStatuses", "containerStatuses"} {
		for _, status := range o.Objects("status", list) {
			state, _ := json.Marshal(status["state"])
			text += fmt.Sprintf("; %s restarted %v times: %s", status.Text("name"), status["restartCount"], state)
		}
	}
	return text
}

// waiting waits until a container of a pod waits for a reason.
func (t *T) waiting(name, reason string, timeout time.Duration) error {
	_, err := t.m.cluster.Admin.Await(podPath(name), timeout, func(o Object) error {
		statuses := append(o.Objects("status", "initContainerStatuses"), o.Objects("status", "containerStatuses")...)
		for _, status := range statuses {
			if status.Text("state", "waiting", "reason") == reason {
				return nil
			}
		}
		return fmt.Errorf("no container waits for %s: %s", reason, describe(o))
	})
	return err
}

// rejected waits until a pod is failed for a reason.
func (t *T) rejected(name, reason string, timeout time.Duration) (Object, error) {
	return t.m.cluster.Admin.Await(podPath(name), timeout, func(o Object) error {
		if o.Text("status", "phase") != "Failed" || o.Text("status", "reason") != reason {
			return fmt.Errorf("it is not failed for %s: %s", reason, describe(o))
		}
		return nil
	})
}

// event waits for an event of a pod that contains a text, and returns its message.
func (t *T) event(name, text string) (string, error) {
	var message string
	query := url.Values{"fieldSelector": {"involvedObject.name=" + name}}
	err := t.m.cluster.Admin.AwaitList(eventsPath, query, soon, func(events []Object) error {
		var all []string
		for _, event := range events {
			if message = event.Text("message"); strings.Contains(message, text) {
				return nil
			}
			all = append(all, message)
		}
		return fmt.Errorf("no event of %s has %q: %s", name, text, strings.Join(all, " | "))
	})
	return message, err
}

// holding waits until containers of a pod run and hold open all of their devices, and returns the last one. The default is `main`.
func (t *T) holding(name string, timeout time.Duration, containers ...string) (instance, error) {
	if len(containers) == 0 {
		containers = []string{"main"}
	}
	var last instance
	err := node.Until(timeout, func() error {
		all := instances()
		for _, container := range containers {
			var err error
			if last, err = held(all, name, container); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		if o, failed := t.m.cluster.Admin.Get(podPath(name)); failed == nil {
			err = fmt.Errorf("%w: %s", err, describe(o))
		}
	}
	return last, err
}

// killContainer kills the process of a container, as a crash.
func killContainer(i instance) error { return syscall.Kill(i.pid, syscall.SIGKILL) }

// restarted waits until another container has the place of one that was killed.
func (t *T) restarted(before instance) (instance, error) {
	var again instance
	err := node.Until(soon, func() error {
		var err error
		again, err = held(instances(), before.env["POD"], before.env["CONTAINER"])
		if err == nil && again.container == before.container {
			err = fmt.Errorf("%v was killed", again)
		}
		return err
	})
	return again, err
}

// held returns a container if it runs and holds open all of its devices.
func held(all []instance, pod, container string) (instance, error) {
	i := slices.IndexFunc(all, func(i instance) bool { return i.env["POD"] == pod && i.env["CONTAINER"] == container })
	if i < 0 {
		return instance{}, fmt.Errorf("%s/%s does not run", pod, container)
	}
	return all[i], all[i].complete()
}

const (
	nodePath   = "/api/v1/nodes/" + nodeName
	podsPath   = "/api/v1/namespaces/default/pods"
	eventsPath = "/api/v1/namespaces/default/events"
)

func podPath(name string) string { return podsPath + "/" + name }

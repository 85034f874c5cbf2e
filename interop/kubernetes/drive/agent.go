package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"devlet.test/interop/kubernetes/cluster"
	"devlet.test/interop/node"
)

// The JSON of devlet is read in this file only.

// container is a container with devices, as options prints it.
type container = node.Container

// options returns the only container of a pod of the scenario's namespace.
func (h *host) options(pod string) (container, error) {
	out, err := h.Run("options", h.t.name+"/"+pod, "--format", "json")
	if err != nil {
		return container{}, err
	}
	var answer struct{ Containers []container }
	if err := json.Unmarshal(out, &answer); err != nil {
		return container{}, err
	}
	if len(answer.Containers) != 1 {
		return container{}, fmt.Errorf("%d containers: %s", len(answer.Containers), out)
	}
	return answer.Containers[0], nil
}

// driverView is a driver as `get drivers` prints it.
type driverView struct {
	Name, State string
	Claims      int
	Plugins     []struct{ Service string }
}

// driver returns a driver, or an error if devlet does not list it.
func (h *host) driver(name string) (driverView, error) {
	var all struct{ Drivers []driverView }
	if err := h.Ask(&all, "get", "drivers"); err != nil {
		return driverView{}, err
	}
	if i := slices.IndexFunc(all.Drivers, func(d driverView) bool { return d.Name == name }); i >= 0 {
		return all.Drivers[i], nil
	}
	return driverView{}, errors.New("devlet does not list the driver")
}

// serving returns an error unless the driver is connected.
func (h *host) serving(driver string) error {
	view, err := h.driver(driver)
	if err != nil {
		return err
	}
	return equal("state of the driver", view.State, "serving")
}

// serve starts devlet as the device part of the node.
func (h *host) serve(flags ...string) { h.serveAs(h.user, flags...) }

// serveAs starts devlet as the device part of the node, with the rights of another user.
func (h *host) serveAs(user cluster.User, flags ...string) {
	kubeconfig, err := h.t.Kubeconfig(user)
	h.t.ok(err)
	h.start(append([]string{"--kubeconfig", kubeconfig, "--node-name", h.name, "--mode", "agent"}, flags...)...)
}

// podView is a pod as `get pods` prints it.
type podView struct {
	UID, Namespace, Name, Source string
	// Waiting is set for a pod that is not admitted.
	Waiting    *struct{ Reason string }
	Claims     []struct{ Name, UID, Phase string }
	Containers []struct {
		Name    string
		Devices []struct{ IDs []string }
	}
}

// holds reports whether the pod has all it asked for.
func (p podView) holds() bool {
	return !slices.ContainsFunc(p.Claims, func(c struct{ Name, UID, Phase string }) bool { return c.Phase != "prepared" })
}

// listed returns the pods that devlet has admitted, and those that wait, by UID.
func (h *host) listed() (map[string]podView, error) {
	var all struct{ Pods []podView }
	if err := h.Ask(&all, "get", "pods"); err != nil {
		return nil, err
	}
	byUID := map[string]podView{}
	for _, p := range all.Pods {
		byUID[p.UID] = p
	}
	return byUID, nil
}

// admitted returns the pods that devlet has admitted, by UID.
func (h *host) admitted() (map[string]podView, error) {
	pods, err := h.listed()
	maps.DeleteFunc(pods, func(_ string, p podView) bool { return p.Waiting != nil })
	return pods, err
}

// awaitWaiting waits until a pod waits for a reason with a text.
func (h *host) awaitWaiting(pod Object, text string) error {
	return node.Until(soon, func() error {
		pods, err := h.listed()
		if err != nil {
			return err
		}
		if p := pods[pod.UID()]; p.Waiting == nil || !strings.Contains(p.Waiting.Reason, text) {
			return fmt.Errorf("the reason does not contain %q: %s; %s", text, p, h.status())
		}
		return nil
	})
}

// awaitAdmitted waits until devlet has admitted a pod and prepared its claims.
func (h *host) awaitAdmitted(pod Object, timeout time.Duration) error {
	return node.Until(timeout, func() error {
		pods, err := h.admitted()
		if err != nil {
			return err
		}
		if p, ok := pods[pod.UID()]; !ok || !p.holds() {
			waiting, _ := h.listed()
			return fmt.Errorf("it is not admitted: %s; %s", waiting[pod.UID()], h.status())
		}
		return nil
	})
}

// awaitReleased waits until devlet has not admitted a pod. Its object may still exist.
func (h *host) awaitReleased(pod Object) error {
	return node.Until(soon, func() error {
		pods, err := h.admitted()
		if err == nil && pods[pod.UID()].UID != "" {
			err = fmt.Errorf("it is admitted: %s; %s", pods[pod.UID()], h.status())
		}
		return err
	})
}

// awaitRemoved waits until devlet does not know a pod.
func (h *host) awaitRemoved(pod Object, timeout time.Duration) error {
	return node.Until(timeout, func() error {
		pods, err := h.listed()
		if err == nil && pods[pod.UID()].UID != "" {
			err = fmt.Errorf("devlet has it: %s; %s", pods[pod.UID()], h.status())
		}
		return err
	})
}

// claimCount waits until devlet has a number of claims.
func (h *host) claimCount(count int, timeout time.Duration) error {
	return node.Until(timeout, func() error {
		var all struct{ Claims []Object }
		if err := h.Ask(&all, "get", "claims"); err != nil {
			return err
		}
		if len(all.Claims) != count {
			return fmt.Errorf("%d claims, not %d: %v", len(all.Claims), count, all.Claims)
		}
		return nil
	})
}

// String prints the pod for messages.
func (p podView) String() string {
	text, _ := json.Marshal(p)
	return string(text)
}

// awaitAbandoned waits until devlet has abandoned the driver of a claim.
func (h *host) awaitAbandoned(claim string) error {
	return node.Until(soon, func() error {
		var all struct{ Claims []struct{ UID, Phase string } }
		if err := h.Ask(&all, "get", "claims"); err != nil {
			return err
		}
		for _, c := range all.Claims {
			if c.UID == claim {
				return equal("phase", c.Phase, "abandoned")
			}
		}
		return fmt.Errorf("devlet does not list the claim: %v", all.Claims)
	})
}

// status returns the failing reconcilers for messages.
func (h *host) status() string {
	view, err := h.kubernetes()
	if err != nil {
		return err.Error()
	}
	text := "reconcilers:"
	for _, r := range view.Objects("reconcilers") {
		text += " " + r.Text("name")
		if r.Text("failingSince") != "" {
			text += fmt.Sprintf(" (%s)", r.Text("lastError", "message"))
		}
	}
	return text
}

// statusView returns the JSON of status.
func (h *host) statusView() (Object, error) {
	// The exit code is 1 while devlet is not ready; the text is still valid.
	out, err := h.RunAny("status", "-o", "json")
	if err != nil {
		return nil, err
	}
	var status Object
	return status, json.Unmarshal(out, &status)
}

// kubernetes returns the object `kubernetes` of status.
func (h *host) kubernetes() (Object, error) {
	status, err := h.statusView()
	if err != nil {
		return nil, err
	}
	if view := status.Object("kubernetes"); view != nil {
		return view, nil
	}
	return nil, errors.New("status has no object kubernetes")
}

// awaitProblem waits until status has a problem with a text, or none.
func (h *host) awaitProblem(text string, exists bool) error {
	return node.Until(soon, func() error {
		status, err := h.statusView()
		if err != nil {
			return err
		}
		has := slices.ContainsFunc(status.Objects("problems"), func(p Object) bool { return strings.Contains(p.Text("what"), text) })
		if has != exists {
			return fmt.Errorf("problems: %v", status.At("problems"))
		}
		return nil
	})
}

// awaitReconciler waits until a reconciler has succeeded.
func (h *host) awaitReconciler(name string) error {
	return node.Until(soon, func() error {
		view, err := h.kubernetes()
		if err != nil {
			return err
		}
		for _, r := range view.Objects("reconcilers") {
			if r.Text("name") == name && r.Text("lastSuccess") != "" {
				return nil
			}
		}
		return fmt.Errorf("%s has not succeeded; %s", name, h.status())
	})
}

// awaitError waits until a reconciler fails with an error that has a text.
func (h *host) awaitError(reconciler, text string, timeout time.Duration) error {
	return node.Until(timeout, func() error {
		view, err := h.kubernetes()
		if err != nil {
			return err
		}
		for _, r := range view.Objects("reconcilers") {
			failing := r.Text("name") == reconciler && r.Text("failingSince") != ""
			if failing && strings.Contains(r.Text("lastError", "message"), text) {
				return nil
			}
		}
		return fmt.Errorf("no error of %s with %q; %s", reconciler, text, h.status())
	})
}

// awaitSuccess waits until a reconciler has succeeded since devlet started.
func (h *host) awaitSuccess(reconciler string) error {
	return node.Until(soon, func() error {
		view, err := h.kubernetes()
		if err != nil {
			return err
		}
		for _, r := range view.Objects("reconcilers") {
			if r.Text("name") == reconciler && r.Text("lastSuccess") != "" && r.Text("failingSince") == "" {
				return nil
			}
		}
		return fmt.Errorf("%s has not succeeded; %s", reconciler, h.status())
	})
}

// sliceView is a ResourceSlice as `get slices` prints it.
type sliceView struct {
	Name, Driver string
	StaleOwner   bool
}

// listedSlices returns the slices that devlet lists.
func (h *host) listedSlices() ([]sliceView, error) {
	var all struct{ Slices []sliceView }
	err := h.Ask(&all, "get", "slices")
	return all.Slices, err
}

package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"

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

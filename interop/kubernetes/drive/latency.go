package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"os"
	"strings"
	"sync"
	"time"

	"devlet.test/interop/node"
)

// latency is the time of one pod, in nanoseconds. bench/README.md describes it.
type latency struct {
	// Admitted is the time from the request that binds the pod to the node until devlet has admitted it.
	Admitted int64 `json:"admitted"`
	// Seen is the time until a plain watch of the node's pods shows it, Patched that of a patch of its status.
	Seen    int64 `json:"seen"`
	Patched int64 `json:"patched"`
}

// latencies is the content of the file of --measure.
type latencies struct {
	Devices []latency `json:"devices"`
	Claims  []latency `json:"claims"`
}

// measure has devlet admit pods one after the other. The test is the scheduler, so that only API server and devlet count.
func measure(t *T) {
	s := newScene(t)
	resource := "example.com/" + t.name
	s.h.plugin(resource, 1)
	t.Must("the plugin's device is published", s.h.counts(resource, "1", "1"))
	seen, stop := s.appearances()
	defer stop()
	var result latencies
	for i := range *samples {
		name := fmt.Sprintf("device-%d", i)
		result.Devices = append(result.Devices, s.sample(pod{name: name, limits: Object{resource: "1"}}, seen))
		name = fmt.Sprintf("claim-%d", i)
		s.allocated(name)
		result.Claims = append(result.Claims, s.sample(pod{name: name, claim: name}, seen))
	}
	text, err := json.Marshal(result)
	t.ok(err)
	t.ok(os.WriteFile(*latencyFile, text, 0o644))
}

// appearances records when a plain watch shows pods of the node.
func (s *scene) appearances() (seen *sync.Map, stop func()) {
	query := url.Values{"fieldSelector": {"spec.nodeName=" + s.h.name}}
	_, version, err := s.h.api.List("/api/v1/pods", query)
	s.ok(err)
	query.Set("resourceVersion", version)
	ctx, cancel := context.WithCancel(context.Background())
	seen = &sync.Map{}
	go s.h.api.Watch(ctx, "/api/v1/pods", query, func(kind string, pod Object) bool {
		if kind == "ADDED" {
			seen.Store(pod.Name(), time.Now())
		}
		return true
	})
	return seen, cancel
}

// allocated creates a claim with the driver's device.
func (s *scene) allocated(name string) {
	s.claim(name, s.driver, 1)
	_, err := s.Admin.Patch(s.path("resourceclaims", name, "status"), Object{"status": Object{
		"allocation": Object{"devices": Object{"results": []any{Object{
			"request": "device", "driver": s.driver, "pool": s.h.name, "device": "device-0",
		}}}},
	}})
	s.ok(err)
}

// sample binds a pod to the node as a scheduler does, waits until devlet has admitted it, and deletes it.
func (s *scene) sample(p pod, seen *sync.Map) latency {
	p.host, p.unscheduled = s.h, true
	created := s.create(p)
	if p.claim != "" {
		_, err := s.Admin.Patch(s.path("resourceclaims", p.claim, "status"), Object{"status": Object{"reservedFor": []any{
			Object{"resource": "pods", "name": p.name, "uid": created.UID()},
		}}})
		s.ok(err)
	}
	began := time.Now()
	_, err := s.Admin.Create(s.path("pods", p.name, "binding"), Object{
		"apiVersion": "v1", "kind": "Binding", "metadata": Object{"name": p.name},
		"target": Object{"apiVersion": "v1", "kind": "Node", "name": s.h.name},
	})
	s.ok(err)
	s.ok(s.h.awaitAdmitted(created, soon))
	admitted, err := s.h.loggedAt("pod admitted", created.UID())
	s.ok(err)
	var shown time.Time
	s.ok(node.Until(soon, func() error {
		at, ok := seen.Load(p.name)
		if !ok {
			return errors.New("the watch does not show the pod")
		}
		shown = at.(time.Time)
		return nil
	}))
	patching := time.Now()
	_, err = s.h.api.Patch(s.path("pods", p.name, "status"), Object{"status": Object{"message": "measured"}})
	s.ok(err)
	patched := time.Since(patching)
	s.ok(s.Admin.Delete(s.path("pods", p.name), 0))
	s.ok(s.h.awaitRemoved(created, soon))
	if p.claim != "" {
		s.ok(s.Admin.Delete(s.path("resourceclaims", p.claim), -1))
	}
	return latency{Admitted: int64(admitted.Sub(began)), Seen: int64(shown.Sub(began)), Patched: int64(patched)}
}

// loggedAt waits for a line of devlet's log with a message and a text, and returns its time.
func (h *host) loggedAt(message, text string) (at time.Time, err error) {
	err = node.Until(soon, func() (err error) {
		for line := range strings.Lines(h.Log()) {
			if stamp, rest, _ := strings.Cut(line, " "); strings.Contains(rest, message) && strings.Contains(rest, text) {
				at, err = time.Parse(time.RFC3339Nano, stamp)
				return err
			}
		}
		return fmt.Errorf("its log has no %q", message)
	})
	return at, err
}

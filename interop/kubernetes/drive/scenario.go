package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime/debug"
	"strings"
	"sync"
	"time"

	"devlet.test/interop/kubernetes/cluster"
)

// Object is an object of the API.
type Object = cluster.Object

// T is a running scenario. Its node and its namespace have the scenario's name.
type T struct {
	*cluster.Cluster
	name, dir string
	cleanups  []func()
}

// abort ends a scenario after a failure that was reported.
type abort struct{}

// shared is the control plane of all scenarios that do not damage it.
var shared struct {
	sync.Mutex
	*cluster.Cluster
}

// scenario runs a scenario with the shared control plane, or with one of its own.
func (t *T) scenario(run func(*T), alone bool) {
	defer func() {
		if failure := recover(); failure != nil && failure != (abort{}) {
			t.Check("panic", fmt.Errorf("%v\n%s", failure, debug.Stack()))
		}
		for i := range t.cleanups {
			t.cleanups[len(t.cleanups)-1-i]()
		}
	}()
	t.ok(os.MkdirAll(t.dir, 0o755))
	if alone {
		t.Cluster = t.startCluster()
		t.cleanup(t.Stop)
	} else {
		t.Cluster = t.sharedCluster()
	}
	_, err := t.Admin.Create("/api/v1/namespaces", Object{"metadata": Object{"name": t.name}})
	t.ok(err)
	// Pods are refused without it.
	_, err = t.Admin.Await(t.path("serviceaccounts", "default"), soon, cluster.Exists)
	t.ok(err)
	t.cleanup(func() { t.Admin.Delete("/api/v1/namespaces/"+t.name, -1) })
	run(t)
}

func (t *T) startCluster() *cluster.Cluster {
	dir := filepath.Join(t.dir, "cluster")
	t.ok(os.Mkdir(dir, 0o755))
	started, err := cluster.Start(*programs, dir)
	if err != nil {
		err = fmt.Errorf("the control plane does not start: %w", err)
	}
	t.ok(err)
	return started
}

func (t *T) sharedCluster() *cluster.Cluster {
	shared.Lock()
	defer shared.Unlock()
	if shared.Cluster == nil {
		shared.Cluster = t.startCluster()
	}
	return shared.Cluster
}

// Check prints and counts one result.
func (t *T) Check(what string, err error) bool {
	results.Lock()
	defer results.Unlock()
	return results.Check(t.name+": "+what, err)
}

// Must is Check, and ends the scenario on a failure.
func (t *T) Must(what string, err error) {
	if !t.Check(what, err) {
		panic(abort{})
	}
}

// ok ends the scenario if a step that is not a result of its own fails.
func (t *T) ok(err error) {
	if err != nil {
		t.Must("a step", err)
	}
}

// cleanup adds a function that runs at the end, the last one first.
func (t *T) cleanup(do func()) { t.cleanups = append(t.cleanups, do) }

// write writes a file of the scenario and returns its path.
func (t *T) write(name string, content []byte) string {
	path := filepath.Join(t.dir, name)
	t.ok(os.WriteFile(path, content, 0o600))
	return path
}

// equal returns an error if two values, as printed, differ.
func equal(what string, got, want any) error {
	if g, w := fmt.Sprint(got), fmt.Sprint(want); g != w {
		return fmt.Errorf("%s: %s, not %s", what, g, w)
	}
	return nil
}

// refused returns an error unless there is one that contains a text.
func refused(err error, text string) error {
	if err == nil {
		return errors.New("it succeeds")
	}
	if !strings.Contains(err.Error(), text) {
		return fmt.Errorf("the error does not contain %q: %w", text, err)
	}
	return nil
}

// between returns an error unless a time is within limits.
func between(took, least, most time.Duration) error {
	if took < least || took > most {
		return fmt.Errorf("after %v", took)
	}
	return nil
}

package main

import (
	"errors"
	"fmt"
	"runtime/debug"
	"strings"
	"time"

	"devlet.test/interop/kubernetes/cluster"
)

// Object is an object of the API.
type Object = cluster.Object

// Deadlines, sized for a busy machine with two cores.
const (
	soon = 60 * time.Second
	late = 120 * time.Second
)

// T is a running scenario.
type T struct {
	m        *machine
	name     string
	cleanups []func()
}

// abort ends a scenario after a failure that was reported.
type abort struct{}

// run runs a scenario on a node, and removes its pods and plugins.
func (s scenario) execute(m *machine) {
	t := &T{m: m, name: s.title(m.shield)}
	defer func() {
		if failure := recover(); failure != nil && failure != (abort{}) {
			results.Check(t.name, fmt.Errorf("%v\n%s", failure, debug.Stack()))
		}
		for i := range t.cleanups {
			t.cleanups[len(t.cleanups)-1-i]()
		}
		// The next scenario starts with an empty node.
		if err := m.empty(); err != nil {
			results.Check(t.name+": the node is empty", err)
		}
	}()
	started := time.Now()
	s.run(t)
	fmt.Printf("%s: took %s\n", t.name, seconds(time.Since(started)))
}

// Check prints and counts one result.
func (t *T) Check(what string, err error) bool { return results.Check(t.name+": "+what, err) }

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

// measured prints a number of the table.
func (t *T) measured(row string, format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	fmt.Printf("%s: %s: %s\n", t.name, row, text)
	table.set(row, t.m.shield, text)
}

// equal returns an error if two values, as printed, differ.
func equal(what string, got, want any) error {
	if g, w := fmt.Sprint(got), fmt.Sprint(want); g != w {
		return fmt.Errorf("%s: %s, not %s", what, g, w)
	}
	return nil
}

// contains returns an error unless a text has a part.
func contains(text, part string) error {
	if !strings.Contains(text, part) {
		return fmt.Errorf("%q does not contain %q", text, part)
	}
	return nil
}

// none returns the violations as an error.
func none(violations []string) error {
	if len(violations) == 0 {
		return nil
	}
	return errors.New(strings.Join(violations, "; "))
}

// seconds prints a duration for the table.
func seconds(d time.Duration) string { return fmt.Sprintf("%.1f s", d.Seconds()) }

// Package events is the interface of the drivers of interop to their test: events
// as JSON lines on standard output, commands as words on standard input.
package events

import (
	"bufio"
	"encoding/json"
	"os"
	"strings"
	"sync"
)

// Event is an event of a driver.
type Event struct {
	// Call is the name of a method, or of another event.
	Call string
	// Claims are the UIDs of the claims in a call.
	Claims []string `json:",omitempty"`
	// Text has details.
	Text string `json:",omitempty"`
}

var mu sync.Mutex

// Emit writes an event.
func Emit(e Event) {
	mu.Lock()
	defer mu.Unlock()
	if json.NewEncoder(os.Stdout).Encode(e) != nil {
		os.Exit(0)
	}
}

// Commands calls execute for each line, and returns at the end of input.
func Commands(execute func(words []string) error) {
	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
		words := strings.Fields(lines.Text())
		e := Event{Call: "done"}
		if err := execute(words); err != nil {
			e = Event{Call: "refused", Text: err.Error()}
		}
		Emit(e)
	}
}

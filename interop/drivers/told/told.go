// Package told is how the drivers of interop tell what happens to them, and how
// they are told what to do: JSON lines on standard output, words on standard
// input.
package told

import (
	"bufio"
	"encoding/json"
	"os"
	"strings"
	"sync"
)

// Event is something that happened to a driver.
type Event struct {
	// Call is the name of a method, or of what else happened.
	Call string
	// Claims are the UIDs of those that a call names.
	Claims []string `json:",omitempty"`
	// Text is what else there is to say.
	Text string `json:",omitempty"`
}

var mu sync.Mutex

// Tell writes an event.
func Tell(e Event) {
	mu.Lock()
	defer mu.Unlock()
	if json.NewEncoder(os.Stdout).Encode(e) != nil {
		os.Exit(0)
	}
}

// Commands hands over each line, and returns with the end of input.
func Commands(obey func(words []string) error) {
	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
		words := strings.Fields(lines.Text())
		e := Event{Call: "done"}
		if err := obey(words); err != nil {
			e = Event{Call: "refused", Text: err.Error()}
		}
		Tell(e)
	}
}

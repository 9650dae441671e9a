// A client of Longhaul in Go, with the standard library alone: submits, follows, approves, and receives a webhook whose
// signature it checks.
//
//	longhaul up --manifests examples/clients
//	LONGHAUL_WEBHOOK_SECRET=$(longhaul webhooks secret) go run examples/clients/client.go hello
//
// LONGHAUL_SERVER is where the server is, LONGHAUL_TOKEN what to show it when it asks for a token.
package main

import (
	"bufio"
	"bytes"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"os"
	"strconv"
	"strings"
	"time"
)

type task struct {
	ID    string `json:"id"`
	State string `json:"state"`
}

type event struct {
	Seq  uint64 `json:"seq"`
	Type string `json:"type"`
}

type problem struct {
	Code   string `json:"code"`
	Detail string `json:"detail"`
}

func (p problem) Error() string { return p.Code + ": " + p.Detail }

func server() string {
	if url := os.Getenv("LONGHAUL_SERVER"); url != "" {
		return url
	}
	return "http://127.0.0.1:7171"
}

// open asks for something. A refusal is a problem, which says what is wrong and what to do.
func open(method, path string, body any, headers map[string]string) (*http.Response, error) {
	var content io.Reader
	if body != nil {
		data, err := json.Marshal(body)
		if err != nil {
			return nil, err
		}
		content = bytes.NewReader(data)
	}
	request, err := http.NewRequest(method, server()+path, content)
	if err != nil {
		return nil, err
	}
	if body != nil {
		request.Header.Set("Content-Type", "application/json")
	}
	for name, value := range headers {
		request.Header.Set(name, value)
	}
	if token := os.Getenv("LONGHAUL_TOKEN"); token != "" {
		request.Header.Set("Authorization", "Bearer "+token)
	}
	answer, err := http.DefaultClient.Do(request)
	if err != nil {
		return nil, err
	}
	if answer.StatusCode >= 400 {
		defer answer.Body.Close()
		var refused problem
		if err := json.NewDecoder(answer.Body).Decode(&refused); err != nil {
			return nil, fmt.Errorf("%s: %w", answer.Status, err)
		}
		return nil, refused
	}
	return answer, nil
}

func call(method, path string, body any, headers map[string]string, into any) error {
	answer, err := open(method, path, body, headers)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	return json.NewDecoder(answer.Body).Decode(into)
}

// follow gives every event of a task once and in order, whatever becomes of the connection.
func follow(id string, each func(event) error) error {
	var seen uint64
	for {
		last := map[string]string{"Last-Event-ID": strconv.FormatUint(seen, 10)}
		answer, err := open("GET", "/v1/tasks/"+id+"/events", nil, last)
		var refused problem
		if errors.As(err, &refused) {
			return err
		}
		if err != nil {
			time.Sleep(time.Second)
			continue
		}
		if answer.StatusCode == http.StatusNoContent {
			answer.Body.Close()
			return nil
		}
		lines := bufio.NewReader(answer.Body)
		for {
			line, err := lines.ReadString('\n')
			if err != nil {
				break
			}
			if data, is := strings.CutPrefix(line, "data:"); is {
				var next event
				if err := json.Unmarshal([]byte(data), &next); err != nil {
					return err
				}
				seen = next.Seq
				if err := each(next); err != nil {
					return err
				}
			}
		}
		answer.Body.Close()
	}
}

func approve(id string) error {
	var asked struct {
		Approvals []struct {
			ID     string `json:"id"`
			Digest string `json:"digest"`
		} `json:"approvals"`
	}
	if err := call("GET", "/v1/tasks/"+id+"/approvals", nil, nil, &asked); err != nil {
		return err
	}
	for _, approval := range asked.Approvals {
		// A person would look at what is asked first.
		decision := map[string]string{"decision": "approve", "digest": approval.Digest}
		var decided any
		if err := call("POST", "/v1/tasks/"+id+"/approvals/"+approval.ID, decision, nil, &decided); err != nil {
			return err
		}
	}
	return nil
}

// verify checks a Standard Webhooks signature: of the id, the time and the body, with the secret's bytes.
func verify(secret string, headers http.Header, body []byte) error {
	key, err := base64.StdEncoding.DecodeString(strings.TrimPrefix(secret, "whsec_"))
	if err != nil {
		return err
	}
	id, sent := headers.Get("webhook-id"), headers.Get("webhook-timestamp")
	seconds, err := strconv.ParseInt(sent, 10, 64)
	if err != nil {
		return err
	}
	if age := time.Since(time.Unix(seconds, 0)); age > 5*time.Minute || age < -5*time.Minute {
		return errors.New("the webhook is too old, or from the future")
	}
	mac := hmac.New(sha256.New, key)
	fmt.Fprintf(mac, "%s.%s.", id, sent)
	mac.Write(body)
	expected := mac.Sum(nil)
	// While secrets rotate there are several.
	for _, signature := range strings.Fields(headers.Get("webhook-signature")) {
		given, is := strings.CutPrefix(signature, "v1,")
		if decoded, err := base64.StdEncoding.DecodeString(given); is && err == nil && hmac.Equal(decoded, expected) {
			return nil
		}
	}
	return errors.New("the signature is wrong")
}

type delivery struct {
	Type string `json:"type"`
	Data task   `json:"data"`
}

// receive takes webhooks on a free port, and gives its address.
func receive(secret string, told chan<- delivery) (string, error) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	handler := func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, 8<<20))
		if err == nil {
			err = verify(secret, r.Header, body)
		}
		var next delivery
		if err == nil {
			err = json.Unmarshal(body, &next)
		}
		if err != nil {
			log.Print("refused a webhook: ", err)
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		told <- next
		w.WriteHeader(http.StatusNoContent)
	}
	go func() { log.Fatal(http.Serve(listener, http.HandlerFunc(handler))) }()
	return "http://" + listener.Addr().String() + "/hook", nil
}

func run() error {
	page := "hello"
	if len(os.Args) > 1 {
		page = os.Args[1]
	}
	told := make(chan delivery, 16)
	hook, err := receive(os.Getenv("LONGHAUL_WEBHOOK_SECRET"), told)
	if err != nil {
		return err
	}
	// The key makes it safe to submit again after a broken connection.
	key := make([]byte, 16)
	if _, err := rand.Read(key); err != nil {
		return err
	}
	wanted := map[string]any{
		"handler": "publish",
		"input":   map[string]string{"page": page},
		"webhook": map[string]string{"url": hook},
	}
	var submitted task
	headers := map[string]string{"Idempotency-Key": hex.EncodeToString(key)}
	if err := call("POST", "/v1/tasks", wanted, headers, &submitted); err != nil {
		return err
	}
	fmt.Println("submitted", submitted.ID)
	err = follow(submitted.ID, func(next event) error {
		fmt.Println(next.Seq, next.Type)
		if next.Type == "approval.requested" {
			return approve(submitted.ID)
		}
		return nil
	})
	if err != nil {
		return err
	}
	select {
	case end := <-told:
		fmt.Println("webhook", end.Type, end.Data.ID)
		if end.Data.State != "completed" {
			return errors.New("the task is " + end.Data.State)
		}
		return nil
	case <-time.After(2 * time.Minute):
		return errors.New("no webhook came")
	}
}

func main() {
	if err := run(); err != nil {
		log.Fatal(err)
	}
}

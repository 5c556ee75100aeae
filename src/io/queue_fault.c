/* SPDX-License-Identifier: MIT */
/*
 * Put around any queue, it makes requests fail, come up short, come late or arrive corrupted, by
 * rules: KIND:WHICH[:VALUE], comma-separated.
 *
 *   fail:3        the third request of the job fails once with EIO     fail:3+:ENOSPC  and so do
 *   short:0.5%    half a percent of all requests move half their bytes          all after it
 *   delay:*:5ms   every request comes home 5 ms late
 *   corrupt:7     the seventh has one bit flipped
 *
 * Requests are counted over the whole job by their serial number, so one rule hits one request
 * whichever lane carries it.
 */
#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/error.h"
#include "base/text.h"
#include "io/queue.h"
#include "sys/os.h"

#define RULES_MAX 8

enum kind { FAIL, SHORT, DELAY, CORRUPT };

struct rule {
	enum kind kind;
	uint64_t from, to;	/* serial numbers, both included */
	double share;		/* of all requests, where > 0 */
	bool again;		/* retries are hit too */
	int code;		/* fail */
	uint64_t value;		/* bytes kept, or ns */
};

struct fault_state {
	struct queue inner;
	struct rule rules[RULES_MAX];
	unsigned int rule_count;
	struct queue_list late;		/* home already, but held back until due_ns */
	struct queue_list failed;	/* never sent */
};

static const struct {
	const char *name;
	int code;
} error_names[] = {
	{ "EIO", EIO },	      { "EAGAIN", EAGAIN }, { "EINTR", EINTR },	  { "ENOSPC", ENOSPC },
	{ "EINVAL", EINVAL }, { "ENODEV", ENODEV }, { "ENOMEM", ENOMEM }, { "ENXIO", ENXIO },
	{ "EREMOTEIO", EREMOTEIO }, { "ETIMEDOUT", ETIMEDOUT }, { "EDQUOT", EDQUOT },
	{ "EROFS", EROFS },   { "EBADF", EBADF },   { "ESTALE", ESTALE },
};

static int parse_kind(struct rule *rule, const char *word)
{
	static const char *const names[] = { "fail", "short", "delay", "corrupt" };

	for (unsigned int i = 0; word && i < 4; i++)
		if (!strcmp(word, names[i])) {
			rule->kind = (enum kind)i;
			return 0;
		}
	return -EINVAL;
}

static int parse_which(struct rule *rule, char *word)
{
	size_t length = word ? strlen(word) : 0;
	char *end;

	if (!length)
		return -EINVAL;
	rule->from = 1;
	rule->to = UINT64_MAX;
	if (!strcmp(word, "*")) {
		rule->again = true;
		return 0;
	}
	if (word[length - 1] == '%') {
		if (strspn(word, "0123456789.") != length - 1)
			return -EINVAL;
		rule->share = strtod(word, &end) / 100;
		return end == word + length - 1 && rule->share > 0 && rule->share <= 1 ? 0
										       : -EINVAL;
	}
	if (word[length - 1] == '+') {
		word[length - 1] = 0;
		rule->again = true;
	}
	if (text_to_number(word, UINT64_MAX - 1, &rule->from) || !rule->from)
		return -EINVAL;
	if (!rule->again)
		rule->to = rule->from;
	return 0;
}

static int parse_value(struct rule *rule, const char *word)
{
	rule->code = EIO;
	rule->value = rule->kind == DELAY ? 10000000 : 0;
	if (!word)
		return 0;
	switch (rule->kind) {
	case FAIL:
		for (size_t i = 0; i < sizeof(error_names) / sizeof(error_names[0]); i++)
			if (!strcmp(word, error_names[i].name)) {
				rule->code = error_names[i].code;
				return 0;
			}
		return -EINVAL;
	case SHORT:
		return text_to_size(word, &rule->value);
	case DELAY:
		return text_to_nanoseconds(word, &rule->value);
	default:
		return -EINVAL;
	}
}

static int parse(const char *text, struct rule *rules, unsigned int *count, struct pen_error *err)
{
	char copy[256], *rest = copy, *word;

	*count = 0;
	if (strlen(text) >= sizeof(copy))
		goto bad;
	strcpy(copy, text);
	while ((word = strsep(&rest, ",")) != NULL) {
		struct rule *rule = &rules[*count];

		if (*count == RULES_MAX)
			goto bad;
		memset(rule, 0, sizeof(*rule));
		if (parse_kind(rule, strsep(&word, ":")) || parse_which(rule, strsep(&word, ":")) ||
		    parse_value(rule, strsep(&word, ":")) || word)
			goto bad;
		(*count)++;
	}
	return 0;
bad:
	error_set(err, -EINVAL, "inject", text, -1, "rule %u cannot be understood", *count + 1);
	error_hint(err, "Write KIND:WHICH[:VALUE],... with KIND fail, short, delay or corrupt and "
			"WHICH N, N+, P%% or *, as in fail:3:ENOSPC");
	return -EINVAL;
}

int queue_inject_check(const char *text, struct pen_error *err)
{
	struct rule rules[RULES_MAX];
	unsigned int count;

	return parse(text, rules, &count, err);
}

static int fault_init(struct queue *queue, const struct queue_setup *setup, struct pen_error *err)
{
	struct fault_state *state = os_calloc(1, sizeof(*state));
	struct queue_setup plain = *setup;
	int rc;

	if (!state)
		return error_sys(err, -ENOMEM, "set up", "the fault queue", -1);
	plain.inject = NULL;
	rc = parse(setup->inject, state->rules, &state->rule_count, err);
	if (!rc)
		rc = queue_init(&state->inner, queue->inner, &plain, err);
	if (rc) {
		free(state);
		return rc;
	}
	queue->state = state;
	return 0;
}

static void fault_attach(struct queue *queue, unsigned int index, void *memory, size_t size)
{
	struct fault_state *state = queue->state;

	queue_attach(&state->inner, index, memory, size);
}

/* The same request gives the same answer each time, whatever the timing. */
static bool by_share(uint64_t serial, double share)
{
	uint64_t mixed = serial * 0x9E3779B97F4A7C15ull;

	mixed ^= mixed >> 32;
	mixed *= 0xD6E8FEB86659FD93ull;
	mixed ^= mixed >> 32;
	return (double)(mixed >> 11) * 0x1p-53 < share;
}

static struct rule *find(struct fault_state *state, enum kind kind,
			 const struct queue_request *request)
{
	for (unsigned int i = 0; i < state->rule_count; i++) {
		struct rule *rule = &state->rules[i];

		if (rule->kind != kind || (request->attempt && !rule->again))
			continue;
		if (rule->share > 0 ? by_share(request->serial, rule->share)
				    : request->serial >= rule->from && request->serial <= rule->to)
			return rule;
	}
	return NULL;
}

static void count_hit(struct queue *queue)
{
	if (queue->setup.injected)
		atomic_fetch_add(queue->setup.injected, 1);
}

/* Flip one bit in memory the CPU may touch; the page cache and the GPU's memory are left alone. */
static void flip(struct queue *queue, struct queue_request *request)
{
	if (!queue->inner->on_device && !queue->inner->lends)
		request->buffer[request->length / 2] ^= 1;
}

static int fault_submit(struct queue *queue, struct queue_request *request)
{
	struct fault_state *state = queue->state;
	struct rule *rule = find(state, FAIL, request);
	int rc;

	if (!rule) {
		/* Put right again when it is home: the memory is the user's. */
		bool corrupt = request->write && find(state, CORRUPT, request);

		if (corrupt)
			flip(queue, request);
		rc = queue_submit(&state->inner, request);
		if (corrupt && rc)
			flip(queue, request);
		return rc;
	}
	count_hit(queue);
	request->result = -rule->code;
	queue_list_add(&state->failed, request);
	return 0;
}

/* What the rules do to a request that came home; true where it is held back. */
static bool distort(struct queue *queue, struct queue_request *request)
{
	struct fault_state *state = queue->state;
	struct rule *rule;

	if (request->result) {
		if (request->write && find(state, CORRUPT, request))
			flip(queue, request);
		return false;
	}
	rule = find(state, SHORT, request);
	if (rule) {
		size_t keep = rule->value ? rule->value : request->done / 2;

		count_hit(queue);
		/* Nothing at all would mean the end of the file. */
		keep = keep ? keep : 1;
		if (keep < request->done)
			request->done = keep;
	}
	if (find(state, CORRUPT, request)) {
		count_hit(queue);
		flip(queue, request);
	}
	rule = find(state, DELAY, request);
	if (!rule)
		return false;
	count_hit(queue);
	request->due_ns = os_now() + rule->value;
	queue_list_add(&state->late, request);
	return true;
}

static unsigned int fault_reap(struct queue *queue, struct queue_request **requests,
			       unsigned int max, uint64_t wait_ns)
{
	struct fault_state *state = queue->state;
	struct queue_list still = { NULL, NULL };
	struct queue_request *request;
	unsigned int count = 0, home;

	while (count < max && (request = queue_list_take(&state->failed)) != NULL)
		requests[count++] = request;
	if (count < max) {
		/* Held-back requests are not what the inner queue would wait for. */
		uint64_t wait = count || state->late.first ? 0 : wait_ns;
		unsigned int kept = count;

		home = queue_reap(&state->inner, requests + count, max - count, wait);
		for (unsigned int i = 0; i < home; i++)
			if (!distort(queue, requests[count + i]))
				requests[kept++] = requests[count + i];
		count = kept;
	}
	while ((request = queue_list_take(&state->late)) != NULL) {
		if (count < max && request->due_ns <= os_now())
			requests[count++] = request;
		else
			queue_list_add(&still, request);
	}
	state->late = still;
	if (!count && state->late.first && wait_ns)
		os_sleep(wait_ns < 1000000 ? wait_ns : 1000000);
	return count;
}

static void fault_release(struct queue *queue, struct queue_request *request)
{
	struct fault_state *state = queue->state;

	queue_release(&state->inner, request);
}

static void fault_fini(struct queue *queue)
{
	struct fault_state *state = queue->state;

	queue_fini(&state->inner);
	free(state);
}

const struct queue_ops queue_fault_ops = {
	.name = "fault",
	.init = fault_init,
	.attach = fault_attach,
	.submit = fault_submit,
	.reap = fault_reap,
	.release = fault_release,
	.fini = fault_fini,
};

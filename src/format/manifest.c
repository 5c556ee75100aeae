/* SPDX-License-Identifier: MIT */
/*
 * Reading and writing manifests; see manifest.h. The text is read twice: first to find the members
 * and whatever is no JSON, then each member for what it must be.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include "format/json_write.h"
#include "format/manifest.h"
#include "format/scan.h"
#include "format/words.h"
#include "sys/os.h"

#define FORMAT "penstock-checkpoint"
#define VERSION 1
#define DIGEST "xxh3:"
#define DIGEST_DIGITS 16

/* ----------------------------------------------------------------------------------- names -- */

void manifest_file_name(uint32_t rank, uint32_t turn, char name[32])
{
	if (turn)
		snprintf(name, 32, "rank-%05" PRIu32 ".%" PRIu32 ".pt", rank, turn);
	else
		snprintf(name, 32, "rank-%05" PRIu32 ".pt", rank);
}

/* A name is right if it is the one that its own numbers make. */
bool manifest_file_parse(const char *name, uint32_t *rank, uint32_t *turn)
{
	unsigned int found, number = 0;
	char again[32];

	if (sscanf(name, "rank-%5u.%9u.pt", &found, &number) < 1 || found >= MANIFEST_RANKS_MAX)
		return false;
	manifest_file_name(found, number, again);
	*rank = found;
	*turn = number;
	return !strcmp(name, again);
}

void manifest_step_name(uint64_t step, char name[MANIFEST_STEP_NAME])
{
	snprintf(name, MANIFEST_STEP_NAME, "step-%08" PRIu64, step);
}

bool manifest_step_parse(const char *name, uint64_t *step)
{
	char again[MANIFEST_STEP_NAME];

	if (sscanf(name, "step-%19" SCNu64, step) != 1 || *step > MANIFEST_NUMBER_MAX)
		return false;
	manifest_step_name(*step, again);
	return !strcmp(name, again);
}

void manifest_time(uint64_t seconds, char text[24])
{
	time_t when = (time_t)seconds;
	struct tm tm;

	if (!gmtime_r(&when, &tm) || !strftime(text, 24, "%Y-%m-%dT%H:%M:%SZ", &tm))
		text[0] = 0;
}

static bool is_time(const char *text)
{
	static const char form[] = "0000-00-00T00:00:00Z";

	for (size_t i = 0; i < sizeof(form); i++)
		if (form[i] == '0' ? text[i] < '0' || text[i] > '9' : text[i] != form[i])
			return false;
	return true;
}

static bool is_digest(const char *text)
{
	const char *digits = text + strlen(DIGEST);

	return !strncmp(text, DIGEST, strlen(DIGEST)) && strlen(digits) == DIGEST_DIGITS &&
	       strspn(digits, "0123456789abcdef") == DIGEST_DIGITS;
}

/* --------------------------------------------------------------------------------- reading -- */

/* Members by their place in the tables below; where each value begins, NULL: not there. */
struct members {
	const char *const *names;
	const char *of;			/* "the manifest": whose members they are */
	const unsigned char **values;
};

static const char *const manifest_names[] = {
	"format", "version", "step", "time", "world_size", "files", "user", NULL
};
static const char *const file_names[] = { "name", "bytes", "tensors", "digest", NULL };

enum { M_FORMAT, M_VERSION, M_STEP, M_TIME, M_WORLD_SIZE, M_FILES, M_USER, MANIFEST_MEMBERS };
enum { F_NAME, F_BYTES, F_TENSORS, F_DIGEST, FILE_MEMBERS };

__attribute__((format(printf, 3, 4)))
static int refuse(struct scan *scan, int64_t at, const char *format, ...)
{
	char message[200];
	va_list args;

	va_start(args, format);
	vsnprintf(message, sizeof(message), format, args);
	va_end(args);
	return words_bad(scan->err, scan->name, at, "%s", message);
}

static int find_member(struct scan *scan, const struct members *members,
		       const struct scan_text *key, int64_t at)
{
	char shown[WORDS_NAME];

	for (int i = 0; members->names[i]; i++) {
		if (!scan_text_is(key, members->names[i]))
			continue;
		if (members->values[i])
			return refuse(scan, at, "%s has its \"%s\" twice", members->of,
				      members->names[i]);
		return i;
	}
	return refuse(scan, at, "%s has \"%s\", which nobody knows", members->of,
		      scan_show(key, shown));
}

/* Stand before an object: find its members, each once, and go over it. */
static int find_members(struct scan *scan, const struct members *members)
{
	struct scan_text key;
	int64_t begin = scan_place(scan);
	int more, rc, kind = scan_kind(scan);

	if (kind != '{')
		return kind < 0 ? kind : refuse(scan, begin, "%s is not a JSON object",
						members->of);
	for (more = scan_first(scan, '}'); more > 0; more = scan_next(scan, '}')) {
		int64_t at = scan_place(scan);
		int which;

		rc = scan_key(scan, &key);
		if (rc)
			return rc;
		which = find_member(scan, members, &key, at);
		rc = which < 0 ? which : scan_kind(scan);
		if (rc < 0)
			return rc;
		members->values[which] = scan->at;
		rc = scan_skip(scan);
		if (rc)
			return rc;
	}
	for (int i = 0; !more && members->names[i]; i++)
		if (!members->values[i])
			return refuse(scan, begin, "%s has no \"%s\"", members->of,
				      members->names[i]);
	return more;
}

static int read_number(struct scan *scan, const struct members *members, int which, uint64_t most,
		       uint64_t *value)
{
	struct scan_number number = { .whole = false };
	int rc, kind;

	scan->at = members->values[which];
	kind = scan_kind(scan);
	rc = kind == '0' ? scan_number(scan, &number) : kind < 0 ? kind : 0;
	if (rc)
		return rc;
	scan->at = members->values[which];
	if (!number.whole || number.value > most)
		return refuse(scan, scan_place(scan), "\"%s\" of %s is no whole number up to %"
			      PRIu64, members->names[which], members->of, most);
	*value = number.value;
	return 0;
}

/* A text that is not longer than those that are right; of others the words are the caller's. */
static int read_text(struct scan *scan, const struct members *members, int which, char *to,
		     size_t room)
{
	struct scan_text text;
	int rc, kind;

	to[0] = 0;
	scan->at = members->values[which];
	kind = scan_kind(scan);
	if (kind != '"')
		return kind < 0 ? kind : 0;
	rc = scan_text(scan, &text);
	if (!rc && text.length < room) {
		scan_decode(&text, to);
		/* What holds a NUL is no text of ours. */
		if (strlen(to) != text.length)
			to[0] = 0;
	}
	scan->at = members->values[which];
	return rc;
}

static int read_head(struct scan *scan, const struct members *members, uint64_t step,
		     struct pen_checkpoint *made)
{
	uint64_t number = 0;
	char format[32];
	int rc = read_text(scan, members, M_FORMAT, format, sizeof(format));

	if (!rc && strcmp(format, FORMAT))
		return refuse(scan, scan_place(scan), "its \"format\" is not \"" FORMAT "\"");
	if (!rc)
		rc = read_number(scan, members, M_VERSION, UINT32_MAX, &number);
	if (!rc && number != VERSION) {
		refuse(scan, scan_place(scan), "it has version %" PRIu64 ", and this Penstock "
		       "knows %d only", number, VERSION);
		return -EBADMSG;
	}
	if (!rc)
		rc = read_number(scan, members, M_STEP, MANIFEST_NUMBER_MAX, &made->step);
	if (!rc && made->step != step)
		return refuse(scan, scan_place(scan), "it is of step %" PRIu64 ", and lies in the "
			      "folder of step %" PRIu64, made->step, step);
	if (!rc)
		rc = read_text(scan, members, M_TIME, made->time, sizeof(made->time));
	if (!rc && !is_time(made->time))
		return refuse(scan, scan_place(scan), "its \"time\" is none like "
			      "2026-11-17T02:30:00Z");
	if (!rc)
		rc = read_number(scan, members, M_WORLD_SIZE, MANIFEST_RANKS_MAX, &number);
	if (!rc && !number)
		return refuse(scan, scan_place(scan), "its \"world_size\" is 0");
	made->world_size = (uint32_t)number;
	return rc;
}

static int read_file(struct scan *scan, uint32_t rank, struct pen_checkpoint_file *file)
{
	const unsigned char *values[FILE_MEMBERS] = { NULL };
	struct members members = { file_names, "a file", values };
	const unsigned char *behind;
	uint32_t named, turn;
	int rc = find_members(scan, &members);

	behind = scan->at;
	if (!rc)
		rc = read_text(scan, &members, F_NAME, file->name, sizeof(file->name));
	if (!rc && (!manifest_file_parse(file->name, &named, &turn) || named != rank))
		return refuse(scan, scan_place(scan), "file %" PRIu32 " does not have the name of "
			      "that rank's file", rank);
	if (!rc)
		rc = read_number(scan, &members, F_BYTES, MANIFEST_NUMBER_MAX, &file->bytes);
	if (!rc)
		rc = read_number(scan, &members, F_TENSORS, MANIFEST_NUMBER_MAX, &file->tensors);
	if (!rc)
		rc = read_text(scan, &members, F_DIGEST, file->digest, sizeof(file->digest));
	if (!rc && !is_digest(file->digest))
		return refuse(scan, scan_place(scan), "the \"digest\" of file %" PRIu32 " is not \""
			      DIGEST "\" and %d digits", rank, DIGEST_DIGITS);
	scan->at = behind;
	return rc;
}

/* As many as there are ranks: `files` has no room for more. */
static int read_files(struct scan *scan, const struct members *members,
		      struct pen_checkpoint *made, struct pen_checkpoint_file *files)
{
	int64_t begin;
	int more, rc, kind;

	scan->at = members->values[M_FILES];
	begin = scan_place(scan);
	kind = scan_kind(scan);
	if (kind != '[')
		return kind < 0 ? kind : refuse(scan, begin, "its \"files\" are no list");
	for (more = scan_first(scan, ']'); more > 0; more = scan_next(scan, ']')) {
		struct pen_checkpoint_file *file = &files[made->file_count];

		if (made->file_count == made->world_size)
			return refuse(scan, scan_place(scan), "it has more files than ranks, %"
				      PRIu32, made->world_size);
		rc = read_file(scan, (uint32_t)made->file_count, file);
		if (!rc && file->bytes > MANIFEST_NUMBER_MAX - made->bytes)
			return refuse(scan, begin, "the sizes of its files are too large");
		if (rc)
			return rc;
		made->bytes += file->bytes;
		made->file_count++;
	}
	if (!more && made->file_count < made->world_size)
		return refuse(scan, begin, "it has %zu files, and %" PRIu32 " ranks",
			      made->file_count, made->world_size);
	return more;
}

/* The caller's values, as they stand. */
static int find_user(struct scan *scan, const struct members *members,
		     const unsigned char **begin, size_t *length)
{
	int kind, rc;

	scan->at = members->values[M_USER];
	kind = scan_kind(scan);
	if (kind != '{')
		return kind < 0 ? kind : refuse(scan, scan_place(scan),
						"its \"user\" is no JSON object");
	*begin = scan->at;
	rc = scan_skip(scan);
	*length = (size_t)(scan->at - *begin);
	return rc;
}

/* One piece of memory: the checkpoint, its files, the caller's values. */
static struct pen_checkpoint *allocate(size_t files, const void *user, size_t length)
{
	size_t table = files * sizeof(struct pen_checkpoint_file);
	struct pen_checkpoint *made = os_calloc(1, sizeof(*made) + table + length + 1);

	if (!made)
		return NULL;
	made->files = (struct pen_checkpoint_file *)(made + 1);
	made->user = (char *)(made + 1) + table;
	made->user_length = length;
	memcpy((char *)(made + 1) + table, user, length);
	return made;
}

static int read_all(struct scan *scan, const struct members *members, uint64_t step,
		    struct pen_checkpoint **checkpoint)
{
	struct pen_checkpoint head = { .step = 0 }, *made;
	const unsigned char *user = NULL;
	size_t length = 0;
	int rc = read_head(scan, members, step, &head);

	if (!rc)
		rc = find_user(scan, members, &user, &length);
	if (rc)
		return rc;
	made = allocate(head.world_size, user, length);
	if (!made)
		return error_sys(scan->err, -ENOMEM, "read", scan->name, -1);
	made->step = head.step;
	made->world_size = head.world_size;
	memcpy(made->time, head.time, sizeof(made->time));
	rc = read_files(scan, members, made, (struct pen_checkpoint_file *)(made + 1));
	if (rc)
		free(made);
	else
		*checkpoint = made;
	return rc;
}

int manifest_parse(const char *name, const void *bytes, size_t length, uint64_t step,
		   struct pen_checkpoint **checkpoint, struct pen_error *err)
{
	const unsigned char *values[MANIFEST_MEMBERS] = { NULL };
	struct members members = { manifest_names, "the manifest", values };
	struct scan scan;
	int rc;

	*checkpoint = NULL;
	scan_start(&scan, name, "the manifest", bytes, length, 0, err);
	rc = find_members(&scan, &members);
	if (!rc)
		rc = scan_finish(&scan);
	if (!rc)
		rc = read_all(&scan, &members, step, checkpoint);
	if (rc == -EBADMSG && err) {
		/* JSON of other files is downloaded again; this one cannot be. */
		err->hint[0] = 0;
		error_hint(err, MANIFEST_DAMAGED);
	}
	return rc;
}

/* --------------------------------------------------------------------------------- writing -- */

static void put_file(struct json_text *json, const struct pen_checkpoint_file *file)
{
	json_print(json, "    {\"name\": \"%.31s\", \"bytes\": %" PRIu64 ", ", file->name,
		   file->bytes);
	json_print(json, "\"tensors\": %" PRIu64 ", \"digest\": \"%.31s\"}", file->tensors,
		   file->digest);
}

/* Nothing is written that could not be read. */
static int check_again(const struct json_text *json, const struct pen_checkpoint *checkpoint,
		       struct pen_error *err)
{
	struct pen_checkpoint *again;
	struct pen_error wrong;
	int rc = manifest_parse(MANIFEST, json->bytes, json->length, checkpoint->step, &again,
				&wrong);
	bool same = !rc && again->user_length == checkpoint->user_length;

	free(again);
	if (rc && rc != -EBADMSG)
		return error_sys(err, rc, "write", MANIFEST, -1);
	return same ? 0 : error_set(err, -EINVAL, "write", MANIFEST, -1, "%s",
				    rc ? wrong.message : "its \"user\" is no JSON object");
}

int manifest_write(const struct pen_checkpoint *checkpoint, char **text, size_t *size,
		   struct pen_error *err)
{
	struct json_text json = { .bytes = NULL };
	int rc;

	json_print(&json, "{\n  \"format\": \"" FORMAT "\",\n  \"version\": %d,\n", VERSION);
	json_print(&json, "  \"step\": %" PRIu64 ",\n  \"time\": \"%.23s\",\n", checkpoint->step,
		   checkpoint->time);
	json_print(&json, "  \"world_size\": %" PRIu32 ",\n  \"files\": [\n",
		   checkpoint->world_size);
	for (size_t i = 0; i < checkpoint->file_count; i++) {
		put_file(&json, &checkpoint->files[i]);
		json_print(&json, "%s\n", i + 1 < checkpoint->file_count ? "," : "");
	}
	json_print(&json, "  ],\n  \"user\": ");
	json_put(&json, checkpoint->user, checkpoint->user_length);
	json_print(&json, "\n}\n");
	rc = json.rc ? error_sys(err, json.rc, "write", MANIFEST, -1) : 0;
	if (!rc && json.length > MANIFEST_SIZE_MAX)
		rc = error_set(err, -E2BIG, "write", MANIFEST, -1, "it would have more than %u MiB",
			       MANIFEST_SIZE_MAX >> 20);
	if (!rc)
		rc = check_again(&json, checkpoint, err);
	if (rc) {
		free(json.bytes);
		return rc;
	}
	*text = json.bytes;
	*size = json.length;
	return 0;
}

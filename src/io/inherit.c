/* SPDX-License-Identifier: MIT */
/*
 * What a new file takes over from the one it replaces: owner, mode, access list, extended
 * attributes. Nobody but its writer may do with the new one what they could not do with the old.
 *
 * So where something that limits the rights cannot be kept, others get fewer of them: a group that
 * is not the old one has no more than everybody, and everybody no more than the old group, whose
 * members belong to them now. Without the access list the owner alone has any, since the list may
 * say no to some whom the mode lets in.
 */
#include <endian.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include "io/replace.h"
#include "sys/os.h"

#define ACCESS_LIST "system.posix_acl_access"
/* XATTR_LIST_MAX and XATTR_SIZE_MAX. */
#define ATTRIBUTE_MAX 65536

/* An entry of an access list, as the kernel has it behind four bytes of version. */
struct list_entry {
	uint16_t tag, rights;
	uint32_t id;
};

#define LIST_START 4
#define LIST_GROUP 0x04
#define LIST_MASK 0x10

/* What the old file says to whom: where the new one says it, or how much of it is lost. */
struct rights {
	mode_t mode;
	mode_t group;		/* 0 to 7: what the old file's group may do */
	bool group_lost;	/* the new file has another */
	bool narrow;		/* a list is lost */
};

struct attributes {
	int from, to;
	struct rights *rights;
	char names[ATTRIBUTE_MAX], value[ATTRIBUTE_MAX];
};

static bool begins(const char *name, const char *with)
{
	return !strncmp(name, with, strlen(with));
}

static bool not_allowed(int rc)
{
	return rc == -EPERM || rc == -EACCES || rc == -EOPNOTSUPP;
}

/* Not those that vouch for the old bytes, nor those that are a file system's own affair. */
static bool is_inherited(const char *name)
{
	static const char *const kinds[] = { "user.", "security.", "trusted.", "system." };
	static const char *const others[] = {
		ACCESS_LIST, "security.capability", "security.ima", "security.evm",
		"trusted.overlay.", "user.overlay.", "trusted.SGI_",
	};

	for (size_t i = 0; i < sizeof(others) / sizeof(others[0]); i++)
		if (begins(name, others[i]))
			return false;
	for (size_t i = 0; i < sizeof(kinds) / sizeof(kinds[0]); i++)
		if (begins(name, kinds[i]))
			return true;
	return false;
}

/* The mode has the mask in place of the group's rights where there is a list. */
static mode_t listed_group(const char *list, size_t length)
{
	mode_t rights = S_IRWXO;
	struct list_entry entry;

	for (size_t at = LIST_START; at + sizeof(entry) <= length; at += sizeof(entry)) {
		memcpy(&entry, list + at, sizeof(entry));
		if (le16toh(entry.tag) == LIST_GROUP || le16toh(entry.tag) == LIST_MASK)
			rights &= le16toh(entry.rights);
	}
	return rights;
}

/* The access list, or that there is none: the directory may have given one to the new file. */
static int copy_access_list(struct attributes *all)
{
	int n = os_attribute(all->from, ACCESS_LIST, all->value, sizeof(all->value));

	if (n >= 0) {
		all->rights->group = listed_group(all->value, (size_t)n);
		return os_set_attribute(all->to, ACCESS_LIST, all->value, (size_t)n);
	}
	if (n != -ENODATA && n != -EOPNOTSUPP)
		return n;
	n = os_remove_attribute(all->to, ACCESS_LIST);
	return n == -ENODATA || n == -EOPNOTSUPP ? 0 : n;
}

static int copy_attribute(struct attributes *all, const char *name)
{
	int n = os_attribute(all->from, name, all->value, sizeof(all->value));

	if (n == -ENODATA || not_allowed(n))
		return 0;
	return n < 0 ? n : os_set_attribute(all->to, name, all->value, (size_t)n);
}

static int copy_attributes(struct attributes *all)
{
	int length = os_attributes(all->from, all->names, sizeof(all->names)), rc;

	if (length < 0)
		return length == -EOPNOTSUPP ? 0 : length;
	for (const char *name = all->names; name < all->names + length; name += strlen(name) + 1) {
		if (!is_inherited(name))
			continue;
		rc = copy_attribute(all, name);
		/* NFS has its access list among these. */
		if (rc && begins(name, "system."))
			all->rights->narrow = true;
		else if (rc && !not_allowed(rc) && begins(name, "user."))
			return rc;
	}
	return 0;
}

static int inherit_attributes(int from, int to, struct rights *rights)
{
	struct attributes *all = os_calloc(1, sizeof(*all));
	int rc;

	if (!all)
		return -ENOMEM;
	all->from = from;
	all->to = to;
	all->rights = rights;
	if (copy_access_list(all))
		rights->narrow = true;
	rc = copy_attributes(all);
	free(all);
	return rc;
}

/* The owner and group, as far as they are ours to give. */
static int inherit_owner(const struct stat *old, int fd, struct rights *rights)
{
	struct stat own;
	int rc = os_fstat(fd, &own);

	if (rc || (old->st_uid == own.st_uid && old->st_gid == own.st_gid))
		return rc;
	rc = os_chown(fd, old->st_uid, old->st_gid);
	/* -EINVAL: an owner that this user namespace has no number for. */
	if (rc != -EPERM && rc != -EINVAL)
		return rc;
	if (old->st_uid != own.st_uid)
		rights->mode &= ~(mode_t)S_ISUID;
	rc = old->st_gid == own.st_gid ? 0 : os_chown(fd, (uid_t)-1, old->st_gid);
	if (rc == -EPERM || rc == -EINVAL) {
		rights->group_lost = true;
		rc = 0;
	}
	return rc;
}

/* What is lost is taken from the mode. */
static mode_t remaining(const struct rights *rights)
{
	mode_t mode = rights->mode, others = mode & S_IRWXO;

	if (rights->narrow)
		mode &= ~(mode_t)(S_IRWXG | S_IRWXO);
	if (rights->group_lost)
		mode &= ~(mode_t)(S_ISGID | S_IRWXG | S_IRWXO) | others << 3 | rights->group;
	return mode;
}

static int set_mode(int fd, mode_t mode)
{
	struct stat own;
	int rc = os_fstat(fd, &own);

	if (rc || (own.st_mode & 07777) == mode)
		return rc;
	return os_chmod(fd, mode);
}

static int inherit_from(int old, int fd, const struct stat *st, const char **step)
{
	struct rights rights = {
		.mode = st->st_mode & 07777,
		.group = (st->st_mode & S_IRWXG) >> 3,
		.narrow = old < 0,
	};
	int rc;

	*step = "keep the owner of";
	rc = inherit_owner(st, fd, &rights);
	if (rc)
		return rc;
	*step = "keep the attributes of";
	if (old >= 0)
		rc = inherit_attributes(old, fd, &rights);
	if (rc)
		return rc;
	/* Last: an owner or a list that is set changes it. */
	*step = "keep the mode of";
	return set_mode(fd, remaining(&rights));
}

int inherit(const struct place *place, int fd, mode_t fresh, const char **step)
{
	struct stat st;
	int old, rc = os_lstat(place->directory, place->base, &st);

	*step = "stat";
	if (rc && rc != -ENOENT)
		return rc;
	if (rc || !S_ISREG(st.st_mode)) {
		*step = "set the mode of";
		rc = set_mode(fd, fresh);
		return rc ? rc : 1;
	}
	*step = "keep the attributes of";
	old = os_open(place->directory, place->base, O_RDONLY | O_NOFOLLOW | O_NONBLOCK, 0);
	if (old < 0 && old != -EACCES)
		return old;
	rc = inherit_from(old, fd, &st, step);
	if (old >= 0)
		os_close(old);
	return rc;
}

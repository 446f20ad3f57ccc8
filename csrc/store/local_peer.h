// Connects this process to another process of the machine. It carries packets with descriptors, and tells whether the
// other process still runs.
//
// Ownership: a Peer owns its descriptors, and all of them are closed on exec. Sockets have random names and no file: a
// name goes away with the last process that holds the socket. Names belong to a network namespace, so containers that
// do not share one cannot connect.
// Order: packets of one connection arrive whole and in the order of sending. Threads: the caller serialises. No call
// blocks but `wait` and `Peer::connect`; signals end neither.
//
// Note [Who has ended]. The end of file of a connection tells that the other process has ended. But a forked child (a
// DataLoader worker) holds a copy of the connection, and keeps it open as long as it lives. So a Peer asks a pidfd of
// the other process. The pidfd becomes readable when that process ends, even if others hold its descriptors. By then
// its memory and what it had opened of drivers are gone, which a closed connection does not tell. A pidfd needs the
// other's pid, which the connection knows. If that pid is of a foreign pid namespace, or a sandbox refuses pidfds, only
// the connection is left. Then an end is seen only when the children have ended too.
#pragma once

#include <chrono>
#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <poll.h>

namespace noria {

class Descriptor {
 public:
  explicit Descriptor(int number = -1) : number_(number) {}
  ~Descriptor();
  Descriptor(Descriptor&& other) noexcept : number_(other.release()) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(number_, other.number_);
    return *this;
  }
  Descriptor(const Descriptor&) = delete;  // one owner
  Descriptor& operator=(const Descriptor&) = delete;

  explicit operator bool() const { return number_ >= 0; }
  int number() const { return number_; }
  int release() { return std::exchange(number_, -1); }

 private:
  int number_;
};

class Deadline {
 public:
  explicit Deadline(std::chrono::milliseconds timeout);
  int left_ms() const;  // 0: passed

 private:
  std::chrono::steady_clock::time_point end_;
};

/// Waits until a watched descriptor is ready, or until the deadline.
void wait(std::vector<pollfd> watched, const Deadline& deadline);

/// Throws MachineError with the text of errno.
[[noreturn]] void refuse_to_share(const std::string& call);

/// Returns 32 random letters, enough to be unique.
std::string random_name();
/// Returns a socket that takes connections to `name`.
Descriptor listen_as(const std::string& name);

struct Packet {
  std::size_t size;  // as sent; what exceeds the buffer of the receiver is cut off
  std::vector<Descriptor> descriptors;
};

class Peer {
 public:
  /// Returns the next connection that waits at a listener, or none. A connection of another user is dropped.
  static std::optional<Peer> accept(const Descriptor& listener);
  /// Connects without waiting to be accepted, but waits for a place in the queue. Returns none if it fails, for example
  /// if no process listens; errno says why.
  static std::optional<Peer> connect(const std::string& name, std::chrono::milliseconds timeout);

  /// Returns false if the other end is closed.
  bool send(std::span<const std::byte> bytes, const std::vector<int>& descriptors = {}) const;
  /// Returns none if nothing has come, and an empty packet if the other end is closed.
  std::optional<Packet> hear(std::span<std::byte> bytes) const;
  /// Returns true if the process has ended (see the Note). What it has sent can still be heard.
  bool ended() const;
  /// Returns the descriptors that become ready when there is something to hear, or when the process ends.
  std::vector<pollfd> watched() const;

 private:
  Peer(Descriptor connection, int pid);
  static std::optional<Peer> of(Descriptor connection);  // none: another user

  Descriptor connection_;
  Descriptor process_;  // a pidfd; none: see the Note
  bool has_ended_;      // before this process could ask for a pidfd
};

}  // namespace noria
